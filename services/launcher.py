"""`specroll train`: one machine, all services. Starts them, watches over them, stops them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from services import queue
from services.common import redis_client
from services.common.embedded_redis import EmbeddedRedis
from services.common.lifecycle import Deadline, child_dies_with_me, free_port, port_is_free, stop_on_signals
from services.config import Config
from services.config_loader import ConfigError, load_config
from services.display import Display, print_report
from services.machine import cores, half_of_the_cores
from services.models import fetch_model
from services.run_dir import RunDir

log = logging.getLogger(__name__)

# One Ctrl-C ends everything within 15 s: the services have this long to save, then they are killed.
_STOP_SECONDS = 12.0
# After the learner is done, workers hear of it by heartbeat and leave by themselves.
_LEAVE_SECONDS = 20.0
_POLL_SECONDS = 0.2
_RESTART_SECONDS = 3.0
_TAIL_LINES = 15
_INTERRUPTED = 130  # what a shell reports for SIGINT


@dataclass(slots=True)
class Child:
    """A service's process and the file that holds what it says."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    # For a service that the others can do without: it is started again when it ends.
    arguments: Sequence[str] | None = None
    restart_at: float = 0.0

    def tail(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError:
            return ""
        return "\n".join(f"  {line}" for line in lines)


def train(path: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """Runs a training run to its end. Returns the exit code: 0 done, 1 a service failed, 130 interrupted.

    Raises ConfigError, with nothing started or left behind, where the configuration, the data, the model or the
    machine does not allow the run.
    """
    config = load_config(path, overrides)
    run_dir = RunDir(config.run.dir)
    preflight(config)
    overrides = [*overrides, *_heads(config, path, overrides)]
    run_dir.create(config, resume=resume)
    stop = threading.Event()
    stop_on_signals(stop)
    with ExitStack() as stack:
        environment, redis_settings = _redis(config, run_dir, stack)
        supervisor = Supervisor(run_dir, environment, stop)
        stack.callback(supervisor.stop_all)
        settings = [*overrides, *redis_settings, *_shares(config)]
        common = [f"--config={path}", *(f"--set={text}" for text in settings)]
        port = config.learner.port or free_port(config.learner.host)
        supervisor.start("learner", [*common, f"--set=learner.port={port}", *(["--resume"] if resume else [])])
        supervisor.start("rollout", [
            *common,
            f"--set=rollout.learner={config.learner.host}:{port}",
            f"--set=rollout.cache={run_dir.root / 'rollout-cache'}",
        ])  # fmt: skip
        if config.rollout.engine.speculation.enabled and config.watcher.enabled:
            arguments = [*common, f"--set=watcher.learner={config.learner.host}:{port}"]
            supervisor.start("watcher", arguments, restart=True)
        with Display(config, run_dir) as display:
            code = supervisor.watch(display)
    if code == 0:
        print_report(run_dir)
    return code


def preflight(config: Config) -> None:
    """Checks all that can be checked before anything is started."""
    for name, service in (("learner", config.learner), ("rollout", config.rollout)):
        if service.port and not port_is_free(service.host, service.port):
            raise ConfigError([f"{name}.port = {service.port} is in use on {service.host}; 0 takes a free one."])
    if config.redis.url.get_secret_value():
        try:
            queue.connect(config).close()
        except redis_client.RedisUnavailable as error:
            raise ConfigError([str(error)]) from None
    model_dir = fetch_model(config.model.source)
    from services.learner.prompts import load_prompts
    from services.models import load_tokenizer

    load_prompts(config.data, load_tokenizer(model_dir), config.run.seed)


class Supervisor:
    """Child processes of one run: none outlives it, and the death of one is the end of all."""

    def __init__(self, run_dir: RunDir, environment: dict[str, str], stop: threading.Event) -> None:
        self._run_dir = run_dir
        self._environment = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
        self._stop = stop
        self._children: dict[str, Child] = {}

    def start(self, name: str, arguments: Sequence[str], *, restart: bool = False) -> None:
        path = self._run_dir.logs / f"{name}.log"
        with path.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                # Ctrl-C reaches the launcher alone, which ends the services in order.
                start_new_session=True,
                preexec_fn=child_dies_with_me(signal.SIGTERM),  # noqa: PLW1509  one prctl call, libc loaded before
            )
        self._children[name] = Child(name, process, path, arguments if restart else None)

    def watch(self, display: Display) -> int:
        """Waits for the learner to end; unblocked by its end, by a signal, by the death of any other service."""
        learner = self._children["learner"]
        while not self._stop.wait(_POLL_SECONDS):
            display.update()
            if learner.process.poll() is not None:
                return self._finish(learner, display)
            for child in list(self._children.values()):
                code = child.process.poll()
                if code is not None and child.arguments is not None:
                    self._start_again(child, display)
                elif code is not None:
                    # The worker may have left because the learner had just ended.
                    if code == 0 and self._ended_soon(learner):
                        return self._finish(learner, display)
                    return self._report_death(child, display)
        display.say("stopping: the steps done are being saved")
        self.stop_all()
        display.update()
        display.say(f"stopped; `specroll train CONFIG --resume` goes on from {self._run_dir.root}")
        return _INTERRUPTED

    def stop_all(self) -> None:
        """Ends every child: asked first, killed after a while."""
        running = [c for c in self._children.values() if c.process.poll() is None]
        for child in running:
            child.process.terminate()
        deadline = Deadline(_STOP_SECONDS)
        for child in running:
            try:
                child.process.wait(deadline.remaining)
            except subprocess.TimeoutExpired:
                log.warning("%s did not end in %.0f s and is killed", child.name, _STOP_SECONDS)
                child.process.kill()
                child.process.wait(5)

    def _finish(self, learner: Child, display: Display) -> int:
        display.update()
        if learner.process.returncode != 0:
            return self._report_death(learner, display)
        for child in self._children.values():
            if child.arguments is not None:
                child.process.terminate()  # it serves the others and does not leave by itself
        deadline = Deadline(_LEAVE_SECONDS)
        while any(c.process.poll() is None for c in self._children.values()) and not deadline.expired:
            time.sleep(_POLL_SECONDS)
        return 0

    def _start_again(self, child: Child, display: Display) -> None:
        """The run goes on without it meanwhile; not at once, as what ended it may not have passed."""
        assert child.arguments is not None
        if child.restart_at == 0.0:
            child.restart_at = time.monotonic() + _RESTART_SECONDS
            code = child.process.returncode
            display.say(f"the {child.name} service ended with code {code} and is started again; see {child.log}")
        elif time.monotonic() >= child.restart_at:
            self.start(child.name, child.arguments, restart=True)

    def _ended_soon(self, child: Child) -> bool:
        try:
            child.process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _report_death(self, child: Child, display: Display) -> int:
        code = child.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        display.error(f"the {child.name} service {how}; its last lines ({child.log}):\n{child.tail()}")
        return 1


def _redis(config: Config, run_dir: RunDir, stack: ExitStack) -> tuple[dict[str, str], list[str]]:
    """Environment and settings with which the children find Redis: the embedded server, unless one is configured.

    A configured URL, which may hold a password, is read by the children themselves: command lines are public.
    """
    if config.redis.url.get_secret_value():
        return {}, []
    server = EmbeddedRedis(run_dir.redis)
    server.start()
    stack.callback(server.stop)
    return server.environment(), [f"redis.url={server.url}"]


def _heads(config: Config, path: Path, overrides: Sequence[str]) -> list[str]:
    """Where `heads.init = "auto"` leads, once they have been trained."""
    speculation = config.rollout.engine.speculation
    if config.heads.init != "auto" or not speculation.enabled or speculation.heads is not None:
        return []
    from services.heads.auto import ensure_heads

    return [f"heads.init={ensure_heads(config, path, overrides)}"]


def _shares(config: Config) -> list[str]:
    """Threads and processors for the engine and the learner, where the configuration leaves them open."""
    engine, learner, available = config.rollout.engine, config.learner, cores()
    half = half_of_the_cores()
    shares = []
    if not engine.threads:
        shares.append(f"rollout.engine.threads={half}")
    if not learner.threads:
        shares.append(f"learner.threads={max(1, len(available) - half)}")
    if len(available) > 1 and not engine.cpus and not learner.cpus:
        shares.append(f"rollout.engine.cpus={available[:half]}")
        shares.append(f"learner.cpus={available[half:]}")
    return shares
