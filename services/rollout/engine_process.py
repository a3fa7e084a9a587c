"""Starting and ending SGLang's processes: environment, arguments, deadline, and nothing left behind."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import zmq

from services.config import EngineConfig
from services.rollout.completion import EngineError
from services.rollout.sglang_plugin import CPU_ATTENTION_BACKEND, SPECULATIVE_ALGORITHM, TREE_ATTENTION_BACKENDS
from services.rollout.sglang_plugin.variables import (
    CPUS_VARIABLE,
    ENABLE_VARIABLE,
    SAMPLER_VARIABLE,
    SPECULATION_VARIABLE,
    THREADS_VARIABLE,
)

log = logging.getLogger(__name__)


def launch(*, config: EngineConfig, dtype: str, model_dir: Path, weight_version: str, seed: int) -> Any:
    """An `sgl.Engine` whose processes are up. Must run in the main thread. Raises EngineError."""
    if threading.current_thread() is not threading.main_thread():
        raise EngineError("The engine must be started in the main thread: SGLang reports failures through signals.")
    arguments = engine_arguments(config, dtype, model_dir, weight_version, seed)
    before = set(psutil.Process().children())
    late = threading.Event()

    def give_up() -> None:
        late.set()
        kill(set(psutil.Process().children()) - before)

    deadline = threading.Timer(config.start_timeout_seconds, give_up)
    deadline.daemon = True
    with _environment(_variables(config)):
        import sglang

        deadline.start()
        try:
            engine = sglang.Engine(**arguments)
        except Exception as error:
            kill(set(psutil.Process().children()) - before)
            if late.is_set():
                raise EngineError(
                    f"The engine did not start within rollout.engine.start_timeout_seconds = "
                    f"{config.start_timeout_seconds:g} s."
                ) from error
            raise EngineError(f"The engine did not start: {error}") from error
        finally:
            deadline.cancel()
    # SGLang would kill every child of this process at exit, ours and other people's.
    atexit.unregister(engine.shutdown)
    engine.tokenizer_manager._subprocess_watchdog.stop()
    # Whether there are counters of speculation SGLang asks a configuration that all engines of a process share: one
    # without speculation would die at its next completion after one with it has started. Ours come with the rounds.
    engine.tokenizer_manager._calculate_spec_decoding_metrics = lambda *_: None
    return engine


def engine_arguments(
    config: EngineConfig, dtype: str, model_dir: Path, weight_version: str, seed: int
) -> dict[str, Any]:
    """`config.args` overrides what is chosen here; a `sampling_backend` there brings SGLang's own sampler back."""
    arguments: dict[str, Any] = {
        "model_path": str(model_dir),
        "dtype": dtype,
        "weight_version": weight_version,
        "random_seed": seed,
        "grammar_backend": "none",
        "max_running_requests": config.max_running_requests,
        "max_total_tokens": config.max_total_tokens,
        "context_length": config.context_length,
        "skip_server_warmup": True,
        "log_level": "warning",
        "custom_sigquit_handler": on_child_failure,
    }
    if not has_accelerator():
        arguments |= {
            "device": "cpu",
            "attention_backend": CPU_ATTENTION_BACKEND,
            "page_size": 1,
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            # An idle scheduler would keep a core busy that a learner could use.
            "sleep_on_idle": True,
        }
    if config.speculation.enabled:
        arguments |= speculation_arguments(config)
    return arguments | config.args


def speculation_arguments(config: EngineConfig) -> dict[str, Any]:
    nodes = config.speculation.max_nodes
    # SGLang's own choice on recent GPUs ignores the mask of a tree.
    attention = {"attention_backend": TREE_ATTENTION_BACKENDS[0]} if has_accelerator() else {}
    return attention | {
        "speculative_algorithm": SPECULATIVE_ALGORITHM,
        "speculative_num_draft_tokens": nodes,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        # Trees are built on the host from what the last round has emitted: there is nothing to overlap with.
        "disable_overlap_schedule": True,
        # A round keeps a path by naming its slots first, which pages of several tokens do not allow.
        "page_size": 1,
        # A decode step reserves twice a tree: a single request of full length must still fit.
        "max_total_tokens": config.max_total_tokens + 2 * nodes,
    }


def on_child_failure(signum: int, frame: object) -> None:  # noqa: ARG001 (a signal handler's signature)
    """SGLang's children send SIGQUIT before they die; their death is noticed on its own."""
    log.error("A process of the engine failed; its log above says why.")


def processes_of(engine: Any) -> list[Any]:
    """The scheduler and detokenizer processes (`multiprocessing.Process`)."""
    return list(engine.tokenizer_manager._subprocess_watchdog._processes)


def drop_messages(engine: Any) -> None:
    """Closes this process's sockets to the engine's, which are gone, with whatever was not delivered.

    ZeroMQ would wait for ever to deliver it, in the garbage collection of the context, or when the interpreter ends.
    """
    for owner in (engine, engine.tokenizer_manager):
        for value in list(vars(owner).values()):
            if isinstance(value, zmq.Socket) and not value.closed:
                value.close(linger=0)


def kill(processes: set[psutil.Process]) -> None:
    """Kills the processes and their descendants and waits until they are gone."""
    doomed = set(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            doomed.update(process.children(recursive=True))
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(doomed, timeout=10)


def has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def thread_count(config: EngineConfig) -> int:
    if config.threads:
        return config.threads
    available = len(config.cpus) or len(os.sched_getaffinity(0))
    return max(1, available // 2)


def _variables(config: EngineConfig) -> dict[str, str]:
    threads = str(thread_count(config))
    cpus = config.cpus or tuple(sorted(os.sched_getaffinity(0)))
    variables = {
        ENABLE_VARIABLE: "1",
        THREADS_VARIABLE: threads,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Left alone, SGLang binds OpenMP to every core of the machine where it has vendor kernels.
        "SGLANG_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
    }
    if not has_accelerator():
        # SGLang compiles its repetition penalty, which on a CPU would need a C++ compiler at run time.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if "sampling_backend" in config.args:
        variables[SAMPLER_VARIABLE] = "sglang"
    if config.speculation.enabled:
        variables[SPECULATION_VARIABLE] = config.speculation.model_dump_json()
    if config.cpus:
        variables[CPUS_VARIABLE] = ",".join(map(str, config.cpus))
    return variables


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables for the processes that start meanwhile, and puts this process's own back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
