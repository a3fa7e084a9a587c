"""Shared fixtures. One engine serves the whole session: starting one takes longer than most test files."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ENGINE_TIMEOUT_SECONDS = 300  # its start alone may take a minute on a busy machine
EXIT_TIMEOUT_SECONDS = 60


def pytest_unconfigure() -> None:
    """A thread or a child that keeps the interpreter from ending must fail the run, not stop it for ever."""
    faulthandler.dump_traceback_later(EXIT_TIMEOUT_SECONDS, exit=True, file=sys.__stderr__)


class _ByPart(LoadScopeScheduling):
    """With `-n`, a file's tests stay in one worker, and so do all of `e2e/`, each of which starts a whole cluster."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "e2e" if "/e2e/" in path else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByPart:
    return _ByPart(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest part begins first. The sort is stable: the order within each part stays.
    items.sort(key=lambda item: "e2e" not in item.path.parts)
    for item in items:
        if "engine" in getattr(item, "fixturenames", ()) or item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_SECONDS))


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[..., Any]]:
    """Runs a coroutine on one loop of the main thread, which all tests of a session share with the engine."""
    loop = asyncio.new_event_loop()

    def run_until_complete(coroutine: Coroutine[Any, Any, Any], timeout: float = 60) -> Any:
        return loop.run_until_complete(asyncio.wait_for(coroutine, timeout))

    yield run_until_complete
    loop.close()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def other_tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy of the same architecture."""
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def _session_engine(tiny_dir: Path, run: Callable[..., Any]) -> Iterator[Any]:
    from services.config import EngineConfig
    from services.rollout.engine import RolloutEngine

    config = EngineConfig(threads=1, context_length=1024, max_total_tokens=8192, max_running_requests=16)
    engine = RolloutEngine.start(config=config, dtype="float32", model_dir=tiny_dir, policy_version=0, seed=0)
    yield engine
    engine.close()


@pytest.fixture
def engine(_session_engine: Any, tiny_dir: Path, run: Callable[..., Any]) -> Iterator[Any]:
    """The session's engine on the tiny model in float32, serving policy 0 at the start of every test."""
    yield _session_engine
    if _session_engine.policy_version != 0:
        run(_session_engine.update_policy(tiny_dir, 0, pause_mode="retract"))
