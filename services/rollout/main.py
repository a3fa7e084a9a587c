"""Starts a rollout worker: `specroll rollout`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from services.config_loader import load_config
from services.machine import limit_threads, quiet_libraries
from services.service_main import service_main


def main(path: Path | None, overrides: Sequence[str]) -> int:
    config = load_config(path, overrides)
    quiet_libraries()
    # Before torch is imported: OpenMP reads its settings once, and the engine's processes inherit them.
    limit_threads(config.rollout.engine.threads, config.rollout.engine.cpus)
    cache = config.rollout.cache

    def build(stop: threading.Event) -> Callable[[], None]:
        from services.rollout.service import RolloutWorker

        return RolloutWorker(config, cache=cache, stop=stop).run

    return service_main("rollout", config.logging.level, build)
