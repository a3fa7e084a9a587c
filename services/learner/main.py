"""Starts the learner service: `specroll learner`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from services.config_loader import load_config
from services.machine import limit_threads, quiet_libraries
from services.models import fetch_model
from services.run_dir import RunDir
from services.service_main import service_main


def main(path: Path | None, overrides: Sequence[str], *, resume: bool) -> int:
    config = load_config(path, overrides)
    quiet_libraries()
    # Before torch is imported: OpenMP reads its settings once.
    limit_threads(config.learner.threads, config.learner.cpus)
    run_dir = RunDir(config.run.dir)
    if not run_dir.exists or resume:
        run_dir.create(config, resume=resume and run_dir.exists)
    model_dir = fetch_model(config.model.source)

    def build(stop: threading.Event) -> Callable[[], None]:
        from services.learner.service import Learner

        learner = Learner(config, model_dir, resume=resume, stop=stop)

        def run() -> None:
            try:
                learner.finish(learner.run())
            finally:
                learner.close()

        return run

    return service_main("learner", config.logging.level, build)
