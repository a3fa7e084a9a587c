"""What each proposer adds: tokens per step at equal nodes, on the same prompts, whatever a step takes.

Every way of drafting completes every prompt, so that gains are compared prompt by prompt. Nothing here is a time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from services.bench.options import ARMS, WARMED
from services.bench.result import Interval, gain_of, ratio_of_sums
from services.rollout.engine import RolloutEngine
from specroll_core.contracts import SamplingParams

_COMPLETION_SECONDS = 600.0
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Acceptance:
    """tokens_per_step: with the bonus, over all completions. gain: relative to the baseline at the same nodes and
    temperature, with a 95 % bootstrap interval over prompts; None for the baseline itself."""

    arm: str
    nodes: int
    temperature: float
    tokens_per_step: Interval
    gain: Interval | None


async def ablate(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    warm: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    arms: Sequence[str],
    baseline: str,
    nodes: Sequence[int],
    temperatures: Sequence[float],
    concurrency: int,
    group_size: int,
    divided: bool,
    progress: Callable[[int, int], None],
) -> list[Acceptance]:
    """warm: prompts that are completed before anything counts, none of `prompts`. arms: of `ARMS`; gains are relative
    to `baseline`, one of them. nodes: beside the root. group_size: completions of each prompt, in flight together and
    learning from each other where there is more than one. divided: each temperature and number of nodes has its own
    share of the prompts, so that none is completed twice by an arm that remembers what it completed."""
    cells = list(itertools.product(temperatures, nodes))
    whole, done = len(cells) * len(arms) + 1, 0
    found: list[Acceptance] = []
    # The scorer and the proposals' vocabulary follow what they see: nobody is to meet them fresh, and the order of the
    # arms moves on by one from cell to cell.
    for arm in WARMED:
        await _sums(engine, warm, sampling, max(nodes), arm, concurrency, group_size)
    for turn, (temperature, count) in enumerate(cells):
        law = replace(sampling, temperature=temperature)
        here = prompts[turn :: len(cells)] if divided else prompts
        sums: dict[str, list[tuple[float, float]]] = {}
        for i in range(len(arms)):
            progress(done := done + 1, whole)
            arm = arms[(turn + i) % len(arms)]
            sums[arm] = await _sums(engine, here, law, count, arm, concurrency, group_size)
        # A prompt that was answered by one token has not been drafted for.
        drafted = [i for i in range(len(here)) if all(row[i][1] for row in sums.values())]
        sums = {arm: [sums[arm][i] for i in drafted] for arm in arms}
        for arm in arms:
            gain = None if arm == baseline or not drafted else gain_of(sums[arm], sums[baseline])
            found.append(Acceptance(arm, count, temperature, ratio_of_sums(sums[arm]), gain))
    progress(whole, whole)
    return found


async def _sums(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    nodes: int,
    arm: str,
    concurrency: int,
    group_size: int,
) -> list[tuple[float, float]]:
    """Of each prompt the tokens that its steps gave, and the steps."""
    room = asyncio.Semaphore(max(1, concurrency // group_size))
    override = replace(ARMS[arm], nodes=1 + nodes)

    async def one(prompt: Sequence[int]) -> tuple[float, float]:
        async with room:
            number = next(_numbers)
            group = f"ablate-{number}" if group_size > 1 else None
            completions = await asyncio.gather(
                *(
                    engine.generate(
                        prompt,
                        sampling,
                        request_id=f"ablate-{number}-{i}",
                        speculation=replace(override, group=group),
                    )
                    for i in range(group_size)
                )
            )
        steps = sum(c.spec.verify_steps for c in completions)
        return float(steps + sum(c.spec.accepted for c in completions)), float(steps)

    each = asyncio.gather(*(one(prompt) for prompt in prompts))
    return list(await asyncio.wait_for(each, _COMPLETION_SECONDS * len(prompts)))


def ablation_table(found: Sequence[Acceptance], temperature: float, baseline: str) -> Table:
    """A row for each way of drafting, two columns for each number of nodes."""
    here = [a for a in found if a.temperature == temperature]
    counts = sorted({a.nodes for a in here})
    out = Table(title=f"temperature {temperature:g}: tokens per step at equal nodes, and the gain over {baseline}")
    out.add_column("arm", no_wrap=True)
    for count in counts:
        out.add_column(f"{count} nodes", justify="right", no_wrap=True)
        out.add_column("gain", justify="right", no_wrap=True)
    for arm in dict.fromkeys(a.arm for a in here):
        row = [arm]
        for a in sorted((a for a in here if a.arm == arm), key=lambda a: a.nodes):
            gain = a.gain
            row.append(str(a.tokens_per_step))
            row.append("" if gain is None else f"{gain.value:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})")
        out.add_row(*row)
    return out
