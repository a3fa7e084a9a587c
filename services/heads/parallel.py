"""Samples in several processes, one thread and one processor each.

A step of a small model is a few hundred short products, between which threads of one process mostly wait for each
other. Processes that share nothing do not.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from services.common.lifecycle import child_dies_with_me
from services.heads.collect import pack, sample_completions, unpack
from services.heads.sampling import Completion
from services.heads.target import TargetModel
from services.machine import cores, keep_freed_memory
from specroll_core.contracts import SamplingParams

# Tokens per process below which starting it, and reading the model again, takes longer than it saves.
WORTH_A_PROCESS = 2000
_TAIL = 2000
_JOB, _OUT, _LOG = "job.json", "rows.safetensors", "log"


def sample_in_processes(
    model: Path,
    dtype: str,
    prompts: Sequence[Sequence[int]],
    laws: Sequence[SamplingParams],
    *,
    tokens: int,
    processes: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """`sample_completions` on the CPU, every process with its share of the prompts and of `tokens`.

    Raises RuntimeError with a process's last words where it fails; none outlives this call.
    """
    available = cores()
    with tempfile.TemporaryDirectory(prefix="specroll-sampling-") as scratch:
        running: list[_Process] = []
        try:
            for index in range(processes):
                mine = range(index, len(prompts), processes)
                directory = Path(scratch) / str(index)
                directory.mkdir()
                job = {
                    "model": str(model),
                    "dtype": dtype,
                    "cpu": available[index % len(available)],
                    "prompts": [list(prompts[i]) for i in mine],
                    "laws": [asdict(law) for law in laws],
                    "tokens": tokens // processes,
                    "seed": seed + index,
                }
                (directory / _JOB).write_text(json.dumps(job))
                running.append(_Process(directory, mine))
            return _gather(running, progress)
        finally:
            for process in running:
                process.end()


class _Process:
    """A running share. prompts: positions of its prompts among all; done: the tokens that it has told of."""

    def __init__(self, directory: Path, prompts: range) -> None:
        self.directory, self.prompts, self.done = directory, prompts, 0
        with (directory / _LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.heads.parallel", str(directory)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                preexec_fn=child_dies_with_me(signal.SIGKILL),  # noqa: PLW1509  one prctl call, libc loaded before
            )

    def listen(self, heard: queue.Queue[tuple[_Process, int | None]]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            heard.put((self, int(line)))
        heard.put((self, None))

    def result(self) -> list[Completion]:
        code = self._process.wait()
        if code != 0:
            said = (self.directory / _LOG).read_text(errors="replace")[-_TAIL:]
            raise RuntimeError(f"a sampling process ended with exit code {code}; its last words:\n{said}")
        made = unpack(load_file(self.directory / _OUT))
        return [replace(one, prompt=self.prompts[one.prompt]) for one in made]

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _gather(running: Sequence[_Process], progress: Callable[[int], None] | None) -> list[Completion]:
    heard: queue.Queue[tuple[_Process, int | None]] = queue.Queue()
    for process in running:
        threading.Thread(target=process.listen, args=(heard,), name="sampling-progress", daemon=True).start()
    made: dict[int, list[Completion]] = {}
    while len(made) < len(running):
        process, done = heard.get()
        if done is None:
            made[running.index(process)] = process.result()
        else:
            process.done = done
            if progress is not None:
                progress(sum(p.done for p in running))
    return [one for index in range(len(running)) for one in made[index]]


def main(directory: Path) -> None:
    """One process's share: reads the job, tells the tokens so far on stdout line by line, writes the rows."""
    job = json.loads((directory / _JOB).read_text())
    os.sched_setaffinity(0, [job["cpu"]])
    torch.set_num_threads(1)
    keep_freed_memory()
    target = TargetModel(Path(job["model"]), getattr(torch, job["dtype"]), torch.device("cpu"))
    laws: list[dict[str, Any]] = job["laws"]
    for law in laws:
        law["stop"] = tuple(law["stop"])

    def tell(done: int) -> None:
        sys.stdout.write(f"{done}\n")
        sys.stdout.flush()

    made = sample_completions(
        target,
        job["prompts"],
        [SamplingParams(**law) for law in laws],
        tokens=job["tokens"],
        seed=job["seed"],
        progress=tell,
    )
    save_file(pack(made), directory / _OUT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
