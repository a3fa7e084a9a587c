"""Draws from the served engine, many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from services.rollout.completion import Completion, SpeculationOverride
from services.rollout.engine import RolloutEngine
from specroll_core.contracts import SamplingParams

_names = count()


@dataclass(frozen=True, slots=True)
class Draw:
    """One request."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    way: SpeculationOverride


async def draw_all(
    engine: RolloutEngine, draws: Sequence[Draw], *, at_once: int, progress: Callable[[int], None] | None = None
) -> list[Completion]:
    """The completions in the order of the requests; at_once: how many the engine holds. progress(done) as they end.

    Raises what `RolloutEngine.generate` raises; what is still running is then cancelled.
    """
    found: list[Completion | None] = [None] * len(draws)
    left = iter(enumerate(draws))
    done = 0

    async def work() -> None:
        nonlocal done
        for index, draw in left:
            found[index] = await engine.generate(
                draw.prompt, draw.sampling, request_id=f"lossless-{next(_names)}", speculation=draw.way
            )
            done += 1
            if progress is not None:
                progress(done)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(at_once, len(draws))):
                workers.create_task(work())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [completion for completion in found if completion is not None]
