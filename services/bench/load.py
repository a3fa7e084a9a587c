"""A closed loop of requests, and what the engine does while it runs."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from services.rollout.completion import Completion, SpeculationOverride, SpeculationStats
from services.rollout.engine import RolloutEngine
from specroll_core.contracts import SamplingParams

_request_numbers = itertools.count()
# Loads end by aborting what is in flight.
_END_SECONDS = 60.0


@dataclass(slots=True)
class Window:
    """What happened in one stretch of time. seconds: its length by the engine's clock; stats: of the engine within it;
    completions: those that ended within it."""

    seconds: float
    stats: SpeculationStats
    completions: list[Completion] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.stats.emitted / self.seconds

    @property
    def tokens_per_decode_second(self) -> float:
        """Without the time of prefills."""
        return self.stats.emitted / (self.seconds - self.stats.prefill_seconds)


class Load:
    """Keeps `concurrency` requests in flight: a new one begins as soon as one has ended. Use as a context manager.

    Completions of one prompt follow each other in groups of `group_size`, so that groups are in flight together.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        concurrency: int,
        override: SpeculationOverride,
        *,
        group_size: int = 1,
        seed: int = 0,
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._concurrency = concurrency
        self._override = override
        order = list(range(len(prompts)))
        random.Random(seed).shuffle(order)  # noqa: S311 (an order of prompts)
        self._next = (
            (prompts[index], f"{number}-{index}" if group_size > 1 else None)
            for number in itertools.count()
            for index in order
            for _ in range(group_size)
        )
        self._ids: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: list[Completion] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._keep_one()) for _ in range(self._concurrency)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), _END_SECONDS)

    async def window(self, seconds: float) -> Window:
        """Waits `seconds` and says what happened meanwhile. Raises what a request raised."""
        before = await self._stats()
        self._ended.clear()
        done, _ = await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        after = await self._stats()
        passed = {name: value - getattr(before, name) for name, value in asdict(after).items()}
        stats = SpeculationStats(**passed)
        return Window(stats.clock_seconds, stats, list(self._ended))

    async def _stats(self) -> SpeculationStats:
        stats = await self._engine.speculation_stats()
        assert stats is not None
        return stats

    async def _keep_one(self) -> None:
        while True:
            prompt, group = next(self._next)
            completion = await self._engine.generate(
                prompt,
                self._sampling,
                request_id=f"bench-{next(_request_numbers)}",
                speculation=replace(self._override, group=group),
            )
            self._ended.append(completion)
