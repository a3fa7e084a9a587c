"""Starts the watcher service: `specroll watcher`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from services.common import grpc_setup
from services.common.lifecycle import wait_until
from services.config import Config
from services.config_loader import ConfigError, load_config
from services.machine import limit_threads, quiet_libraries
from services.run_dir import RunDir
from services.service_main import service_main
from specroll.v1 import learner_pb2, learner_pb2_grpc

# The learner makes the run; on a cold machine it loads a model first.
_RUN_SECONDS = 300.0
_CALL_SECONDS = 5.0


def main(path: Path | None, overrides: Sequence[str]) -> int:
    config = load_config(path, overrides)
    if not config.rollout.engine.speculation.enabled:
        raise ConfigError(["The watcher has nothing to do: rollout.engine.speculation.enabled is not set."])
    quiet_libraries()
    # Before torch is imported: OpenMP reads its settings once.
    limit_threads(config.watcher.threads, ())

    def build(stop: threading.Event) -> Callable[[], None]:
        from services.watcher.service import Watcher
        from services.watcher.trainer import lower_session

        lower_session(config.watcher.nice)
        run_id = _run_id(config, stop)
        watcher = Watcher(config, run_id, stop=stop)

        def run() -> None:
            try:
                watcher.run()
            finally:
                watcher.close()

        return run

    return service_main("watcher", config.logging.level, build)


def _run_id(config: Config, stop: threading.Event) -> str:
    """From the run directory, else from the learner; waits until either is there. Raises DeadlineExceeded."""
    found: list[str] = []

    def look() -> bool:
        run_dir = RunDir(config.run.dir)
        if run_dir.exists:
            found.append(run_dir.run_id)
        elif config.watcher.learner:
            with grpc_setup.channel(config.watcher.learner, security=config.security) as channel:
                try:
                    stub = learner_pb2_grpc.LearnerServiceStub(channel)
                    found.append(stub.GetStatus(learner_pb2.LearnerStatusRequest(), timeout=_CALL_SECONDS).run_id)
                except grpc.RpcError:
                    return False
        return bool(found)

    wait_until(look, _RUN_SECONDS, f"the run in {config.run.dir} (run.dir) or a learner", stop=stop, poll_seconds=0.5)
    if not found:
        raise ConfigError(["The watcher was stopped before a run began."])
    return found[0]
