"""Grades completions in worker processes, each with a hard time limit.

A verifier can hang in ways that no signal or thread interrupts, so it runs in a process that is killed and
replaced at its limit, while the other workers go on. A failure of that machinery is never a reward of 0: it has
a status of its own, and such a sample is not trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from services.config import RewardConfig
from specroll_core.contracts import RewardStatus

log = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 120.0  # imports: a second for sympy, more for a user's libraries on a busy machine
REPLY_LIMIT_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Grade:
    """`reward` means something only where `status` is OK; `detail` says what happened where it is not."""

    reward: float
    status: RewardStatus
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Job:
    completion: str
    answer: str
    result: asyncio.Future[Grade]


class GradingPool:
    """`workers` processes that take completions from one queue, in order.

    counts: grades given by status. restarts: processes replaced after a time-out or a crash.
    Use it from one event loop, in the thread that stays alive longest: the processes die with it.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        # One entry for each caller that waits: as long as the group runner has samples in flight, and no longer.
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.counts: Counter[RewardStatus] = Counter(dict.fromkeys(RewardStatus, 0))
        self.restarts = 0

    async def start(self) -> None:
        """Starts every process and waits until its verifier is loaded.

        Raises ValueError where `reward.verifier` cannot be loaded, RuntimeError where a process does not come up.
        """
        assert not self._tasks, "the pool has been started already"
        workers = [_Worker(self._config.verifier) for _ in range(self._config.workers)]
        try:
            await asyncio.gather(*(worker.start() for worker in workers))
        except BaseException:
            await asyncio.gather(*(worker.kill() for worker in workers))
            raise
        self._tasks = [asyncio.create_task(self._serve(worker), name="grading") for worker in workers]

    async def grade(self, completion: str, answer: str) -> Grade:
        """The verdict on one completion. Waits for a free worker; may be cancelled at any point.

        A job whose caller was cancelled after a worker took it runs to its end, at most `timeout_seconds`, and its
        verdict is dropped.
        """
        assert self._tasks, "the pool has not been started, or has been closed"
        job = _Job(completion, answer, asyncio.get_running_loop().create_future())
        self._jobs.put_nowait(job)
        return await job.result

    async def close(self) -> None:
        """Kills the processes; calls of `grade` that still wait are cancelled."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while not self._jobs.empty():
            self._jobs.get_nowait().result.cancel()

    async def _serve(self, worker: _Worker) -> None:
        """Takes jobs until it is cancelled. Consumes the queue; one job at a time; unblocked by `grade`."""
        try:
            while True:
                job = await self._jobs.get()
                if job.result.done():  # its caller was cancelled while it waited
                    continue
                try:
                    grade = await self._run(worker, job)
                except BaseException:
                    job.result.cancel()
                    raise
                self.counts[grade.status] += 1
                if not job.result.done():
                    job.result.set_result(grade)
        finally:
            await worker.kill()

    async def _run(self, worker: _Worker, job: _Job) -> Grade:
        """One verdict. A crash or an exception is tried again; a time-out is not, because it would come back."""
        detail = ""
        for _ in range(1 + self._config.retries):
            try:
                if not worker.running:
                    await worker.start()
                reply = await worker.ask(
                    {"completion": job.completion, "answer": job.answer}, self._config.timeout_seconds
                )
            except TimeoutError:
                await self._replace(worker)
                detail = f"the verifier was killed after {self._config.timeout_seconds:g} s"
                log.warning("Grading: %s; the sample is left out and the worker replaced.", detail)
                return Grade(0.0, RewardStatus.TIMEOUT, detail)
            except (_WorkerDiedError, RuntimeError, ValueError, OSError) as error:
                await self._replace(worker)
                detail = str(error)
            else:
                if "reward" in reply:
                    return Grade(float(reply["reward"]), RewardStatus.OK)
                detail = str(reply.get("error", "the worker's reply is not readable"))
        log.warning("Grading failed, the sample is left out: %s", detail)
        return Grade(0.0, RewardStatus.ERROR, detail)

    async def _replace(self, worker: _Worker) -> None:
        """Kills a worker. The new process is started by the job that needs it, so that no start-up failure is lost."""
        self.restarts += 1
        await worker.kill()


class _WorkerDiedError(Exception):
    """The process ended before it replied."""


class _Worker:
    """One process of `services.rollout.grading_worker`, and its successor after `kill` and `start`."""

    def __init__(self, verifier: str) -> None:
        self._verifier = verifier
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.rollout.grading_worker", self._verifier, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(),
            limit=REPLY_LIMIT_BYTES,
        )
        try:
            reply = await self._receive(START_TIMEOUT_SECONDS)
        except TimeoutError:
            raise RuntimeError(f"a grading worker was not ready after {START_TIMEOUT_SECONDS:g} s") from None
        except _WorkerDiedError as error:
            raise RuntimeError(f"a grading worker could not start: {error}") from None
        if "error" in reply:
            raise ValueError(reply["error"])

    async def ask(self, request: dict[str, str], timeout_seconds: float) -> dict[str, Any]:
        """The reply to one request. Raises TimeoutError or _WorkerDiedError."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            async with asyncio.timeout(timeout_seconds):
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                await self._process.stdin.drain()
                return await self._receive(timeout_seconds)
        except (BrokenPipeError, ConnectionResetError):
            raise await self._died() from None

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _receive(self, timeout_seconds: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout_seconds):
            line = await self._process.stdout.readline()
            if not line.endswith(b"\n"):
                raise await self._died()
        reply = json.loads(line)
        assert isinstance(reply, dict), "a worker replies with objects"
        return reply

    async def _died(self) -> _WorkerDiedError:
        assert self._process is not None
        return _WorkerDiedError(f"the grading worker ended with status {await self._process.wait()}")


def _environment() -> dict[str, str]:
    """This process' environment without the run's secrets, and with one thread for each worker."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECROLL_")}
    return kept | {"OMP_NUM_THREADS": "1"}
