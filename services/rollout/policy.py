"""The policy that a worker serves: which version, and one load at a time."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.rollout.completion import UpdateReport
from services.rollout.engine import RolloutEngine

PauseMode = Literal["retract", "in_place"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """version counts within a run; digest names the content: after a learner's restart a version can be made anew."""

    version: int
    digest: str


class ServedPolicy:
    """Loads policies into the engine, one after another, and knows what is served."""

    def __init__(self, engine: RolloutEngine, served: Served, *, pause_mode: PauseMode) -> None:
        self._engine = engine
        self._pause_mode = pause_mode
        self._lock = asyncio.Lock()
        self.served = served
        self.updates = 0

    async def load(self, model_dir: Path, new: Served, *, pause_mode: PauseMode | None = None) -> UpdateReport:
        """Serves `new` from now on; requests in flight are kept. A policy that is served already is not loaded again.

        Raises ValueError where the files do not fit the engine: the old policy goes on serving.
        """
        async with self._lock:
            if new == self.served:
                return UpdateReport(pause_seconds=0.0, in_flight=0)
            report = await self._engine.update_policy(model_dir, new.version, pause_mode=pause_mode or self._pause_mode)
            self.served = new
            self.updates += 1
        log.info(
            "serving policy version %d (paused %.2f s, %d requests in flight kept)",
            new.version, report.pause_seconds, report.in_flight,
        )  # fmt: skip
        return report
