"""What happens when processes die: a real engine in a process of its own, which the test may kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

SCRIPT = """
import asyncio, os, signal, sys, zmq
from pathlib import Path
from services.config import EngineConfig
from services.rollout import engine as engine_module
from services.rollout.completion import EngineError
from services.rollout.engine import RolloutEngine
from specroll_core.contracts import SamplingParams

def main():
    config = EngineConfig(threads=1, context_length=1024, max_total_tokens=2048, max_running_requests=4)
    engine = RolloutEngine.start(
        config=config, dtype="float32", model_dir=Path(sys.argv[1]), policy_version=0, seed=0
    )
    pids = [process.pid for process in engine._processes]
    print("pids", *pids, flush=True)

    async def serve():
        endless = SamplingParams(max_new_tokens=1000, ignore_eos=True)
        requests = [asyncio.ensure_future(engine.generate([1, i], endless, request_id=str(i))) for i in range(3)]
        async for _ in engine.stream([9], SamplingParams(max_new_tokens=3, ignore_eos=True), request_id="first"):
            pass
        print("sampling", flush=True)
        if "asks" in sys.argv:
            await ask()
        results = await asyncio.gather(*requests, return_exceptions=True)
        print("failed", sum(isinstance(r, EngineError) for r in results), flush=True)
        try:
            await engine.generate([1], endless, request_id="late")
        except EngineError as error:
            print("refused", error, flush=True)

    async def ask():
        order, seconds = (await asyncio.to_thread(sys.stdin.readline)).split()
        engine_module.ANSWER_SECONDS = float(seconds)
        answer = {
            "update": lambda: engine.update_policy(Path(sys.argv[1]), 1, pause_mode="retract"),
            "state": engine.internal_state,
        }[order]()
        print("asking", flush=True)
        try:
            await answer
        except EngineError as error:
            print("unanswered", error, flush=True)

    asyncio.run(serve())
    if "close" in sys.argv:
        engine.close()
        # What the dead processes never read would keep a garbage collection, or the interpreter's end, for ever.
        owners = (engine._engine, engine._engine.tokenizer_manager)
        sockets = [value for owner in owners for value in vars(owner).values() if isinstance(value, zmq.Socket)]
        assert len(sockets) >= 3
        assert all(socket.closed for socket in sockets)
        print("closed", *(psutil_alive(pids)), flush=True)
    sys.stdin.read()

def psutil_alive(pids):
    import psutil
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]

if __name__ == "__main__":
    main()
"""


class Service:
    def __init__(self, tmp_path, tiny_dir, *arguments):
        script = tmp_path / "service.py"
        script.write_text(SCRIPT)
        command = [sys.executable, str(script), str(tiny_dir), *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def expect(self, word):
        """The rest of the next line that starts with the word; the test's own limit bounds the wait."""
        for line in self.process.stdout:
            head, _, rest = line.strip().partition(" ")
            if head == word:
                return rest
        raise AssertionError(f"the service ended before it said {word!r}")

    def order(self, *words):
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()

    def kill(self):
        self.process.kill()
        self.process.wait(timeout=10)


@pytest.fixture
def service(tmp_path, tiny_dir):
    started = []

    def start(*arguments):
        started.append(Service(tmp_path, tiny_dir, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def await_gone(pids, seconds=15.0):
    until = time.monotonic() + seconds
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < until, [pid for pid in pids if not gone(pid)]
        time.sleep(0.05)


@pytest.mark.engine
def test_a_dead_scheduler_fails_requests_and_closing_leaves_nothing(service):
    running = service("close")
    pids = [int(pid) for pid in running.expect("pids").split()]
    running.expect("sampling")
    os.kill(pids[0], signal.SIGKILL)
    killed_at = time.monotonic()
    assert running.expect("failed") == "3"
    assert time.monotonic() - killed_at < 10
    assert f"process {pids[0]} ended with exit code -9" in running.expect("refused")
    assert running.expect("closed") == ""


@pytest.mark.engine
def test_nothing_outlives_a_service_that_is_killed(service):
    running = service()
    pids = [int(pid) for pid in running.expect("pids").split()]
    running.expect("sampling")
    running.kill()
    await_gone(pids)


@pytest.mark.engine
@pytest.mark.parametrize(("order", "what"), [("update", "load a policy"), ("state", "say how it stands")])
def test_a_scheduler_that_hangs_is_given_up_after_a_time(service, order, what):
    running = service("asks")
    scheduler = int(running.expect("pids").split()[0])
    running.expect("sampling")
    os.kill(scheduler, signal.SIGSTOP)
    running.order(order, "2")
    assert running.expect("unanswered") == f"The engine did not {what} within 2 s."
    assert running.expect("failed") == "3"
    assert running.expect("refused") == f"The engine did not {what} within 2 s."


@pytest.mark.engine
def test_a_scheduler_that_dies_during_a_policy_update_is_named(service):
    running = service("asks")
    scheduler = int(running.expect("pids").split()[0])
    running.expect("sampling")
    os.kill(scheduler, signal.SIGSTOP)  # so that it cannot be done before it is killed
    running.order("update", "600")
    running.expect("asking")
    os.kill(scheduler, signal.SIGKILL)
    assert running.expect("unanswered") == f"The engine's process {scheduler} ended with exit code -9."
    assert running.expect("failed") == "3"
