"""The trainer's process, from the watcher's side: started, looked at, ended; and a priority below everybody's."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.lifecycle import child_dies_with_me
from services.watcher.job import RESULT, JobDirectory, TrainJob
from services.watcher.rows import ChosenRows

log = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_TAIL_BYTES = 500


class TrainingFailed(RuntimeError):
    """The trainer ended without a result; its last words."""


class Trainer:
    """At most one training at a time. root: job directories; threads: of the process."""

    def __init__(self, root: Path, *, threads: int, nice: int) -> None:
        self._root = root
        self._threads = threads
        self._nice = nice
        self._process: subprocess.Popen[bytes] | None = None
        self._files: JobDirectory | None = None
        self._kept = root / "kept.safetensors"
        root.mkdir(parents=True, exist_ok=True)

    @property
    def running(self) -> bool:
        return self._files is not None

    def start(self, job: TrainJob, training: ChosenRows, held_out: ChosenRows, *, go_on: bool = False) -> None:
        """go_on: from heads that were kept, where there are some."""
        assert self._files is None
        files = JobDirectory(self._root / f"job-{self._next_number():06d}")
        try:
            policy = _linked(Path(job.policy_dir), files.path / "policy")
            if go_on and self._kept.exists():
                shutil.copyfile(self._kept, files.begin_file)
            files.write(replace(job, policy_dir=str(policy)), training, held_out)
            self._launch(files)
        except BaseException:
            self.discard(files)
            raise

    def resume(self) -> bool:
        """Goes on with a job that has no result, if the policy that it needs is still there; one that has a result is
        what `poll` returns next. There is one job at a time: older ones were left behind, and are deleted."""
        for path in sorted(self._root.glob("job-*"), reverse=True):
            files = JobDirectory(path)
            if self.running:
                self.discard(files)
                continue
            if (path / RESULT).exists():
                self._files = files
                continue
            try:
                job = files.job()
            except ValueError:
                job = None  # its writer died before it was complete
            if (
                job is not None
                and Path(job.policy_dir).exists()
                and (not job.heads_dir or Path(job.heads_dir).exists())
            ):
                log.info("going on with the training in %s", path)
                self._launch(files)
            else:
                self.discard(files)
        return self.running

    def poll(self) -> tuple[JobDirectory, dict[str, Any]] | None:
        """The result of a training that ended since the last call. Raises TrainingFailed."""
        files, code = self._files, 0 if self._process is None else self._process.poll()
        if files is None or code is None:
            return None
        self._process = self._files = None
        try:
            result = files.result()
        except ValueError:
            result = None
        if code != 0 or result is None:
            last = _tail(files.path / "trainer.log")
            self.discard(files)
            raise TrainingFailed(f"the trainer ended with exit code {code}: {last}")
        return files, result

    def keep(self, files: JobDirectory) -> None:
        """Keeps a job's heads, which do not serve, for a later one to go on from."""
        whole = self._kept.with_suffix(".new")
        shutil.copyfile(files.heads_file, whole)  # a result that is judged again after a kill still has its heads
        os.replace(whole, self._kept)

    def keep_none(self) -> None:
        self._kept.unlink(missing_ok=True)

    def discard(self, files: JobDirectory) -> None:
        """Deletes a job that has been dealt with."""
        shutil.rmtree(files.path, ignore_errors=True)

    def stop(self) -> None:
        """Interrupts a running training, which saves where it stands."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        self._process = self._files = None

    def _launch(self, files: JobDirectory) -> None:
        threads = {name: str(self._threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        with (files.path / "trainer.log").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.watcher.train_process", str(files.path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **threads},
                preexec_fn=_before(self._nice),  # noqa: PLW1509  two system calls, libc loaded before
            )
        self._files = files

    def _next_number(self) -> int:
        numbers = [int(path.name.removeprefix("job-")) for path in self._root.glob("job-*")]
        return max(numbers, default=0) + 1


def _linked(policy: Path, to: Path) -> Path:
    """The policy's files under another name, since the learner deletes policies while a training goes on; where files
    cannot be linked, the policy itself."""
    try:
        shutil.copytree(policy, to, copy_function=lambda file, link: os.link(os.path.realpath(file), link))
    except OSError as error:
        log.debug("%s is read where it is: %s", policy, error)
        shutil.rmtree(to, ignore_errors=True)
        return policy
    return to


def _before(nice: int) -> Callable[[], None]:
    follow = child_dies_with_me(signal.SIGTERM)

    def prepare() -> None:
        follow()
        os.setpriority(os.PRIO_PROCESS, 0, nice)

    return prepare


def lower_session(nice: int) -> None:
    """Makes the whole session of this process give way to others.

    Linux may schedule sessions as groups (autogroup); niceness then counts inside a session only, and a niced process
    in a session of its own takes half a core from anybody.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip().replace("\n", " | ")
    except OSError:
        return "it left no log"
