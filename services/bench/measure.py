"""Running the arms in turn on one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from services.bench.load import Load, Window
from services.bench.options import ARMS, PLAIN, BenchOptions
from services.bench.result import ArmResult, Curve, Interval, accepted_at, accepted_from, ratio_of, ratio_of_sums
from services.rollout.completion import SpeculationOverride
from services.rollout.engine import RolloutEngine
from specroll_core.contracts import SamplingParams

# Windows of the bound's curve are shorter: each gives one mean step time, not a rate.
_CURVE_SHARE = 0.5
# A cell of the slowest machine that anybody would wait for, and what a window may take beside what was asked for.
_CELL_SECONDS, _WINDOW_SECONDS = 3600.0, 60.0


class Bench:
    """progress: called after every window with how many are done, and how many there will be."""

    def __init__(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        options: BenchOptions,
        progress: Callable[[int, int], None],
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._sampling = sampling
        self._options = options
        self._progress = progress
        self._done = 0

    @property
    def windows(self) -> int:
        """How many there are in all."""
        o = self._options
        return len(o.temperatures) * len(o.concurrency) * o.rounds * (len(o.chosen) + self._curve_windows)

    @property
    def cell_seconds(self) -> float:
        """After which a cell's engine must have lost its way."""
        o = self._options
        beside = o.warmup + _WINDOW_SECONDS
        turn = len(o.chosen) * (o.seconds + beside) + self._curve_windows * (o.seconds * _CURVE_SHARE + beside)
        return max(_CELL_SECONDS, o.rounds * turn)

    @property
    def _curve_windows(self) -> int:
        """Of the bound's curve, in each round."""
        o = self._options
        return 1 + len(o.widths) if o.widths and o.curve_of else 0

    async def cell(self, concurrency: int, temperature: float) -> tuple[list[ArmResult], Curve | None]:
        """Each arm in each round, in an order that moves on by one every round, and then each width of the curve.

        So a machine that is slower for a while is so for all of them.
        """
        taken: dict[str, list[Window]] = {arm: [] for arm in self._options.chosen}
        names = list(self._options.chosen)
        seen: dict[int, list[Window]] = {}
        for number in range(self._options.rounds):
            turn = number % len(names)
            for arm in names[turn:] + names[:turn]:
                override = ARMS[arm]
                if arm != PLAIN and self._options.nodes is not None:
                    override = replace(override, nodes=1 + self._options.nodes)
                window = await self._window(concurrency, temperature, override, self._options.seconds, number)
                taken[arm].append(window)
            await self._curve_round(concurrency, temperature, number, seen)
        results = [_result(arm, concurrency, temperature, windows, taken[PLAIN]) for arm, windows in taken.items()]
        return results, Curve(concurrency, temperature, {n: _point(w) for n, w in seen.items()}) if seen else None

    async def _curve_round(
        self, concurrency: int, temperature: float, number: int, seen: dict[int, list[Window]]
    ) -> None:
        """A window of each width, plain decoding among them."""
        arm = self._options.curve_of
        if arm is None or not self._options.widths:
            return
        for width in (0, *self._options.widths):
            override = replace(ARMS[arm], nodes=1 + width)
            seconds = self._options.seconds * _CURVE_SHARE
            window = await self._window(concurrency, temperature, override, seconds, number)
            seen.setdefault(width, []).append(window)

    async def _window(
        self, concurrency: int, temperature: float, override: SpeculationOverride, seconds: float, seed: int
    ) -> Window:
        sampling = replace(self._sampling, temperature=temperature)
        load = Load(
            self._engine,
            self._prompts,
            sampling,
            concurrency,
            override,
            group_size=self._options.group_size,
            seed=seed,
        )
        async with load:
            if self._options.warmup:
                await load.window(self._options.warmup)
            window = await load.window(seconds)
        self._done += 1
        self._progress(self._done, self.windows)
        return window


def _point(windows: Sequence[Window]) -> tuple[int, int, float]:
    """Tokens, requests times steps, and the median window's forward seconds of a step."""
    stats = [window.stats for window in windows]
    seconds = median(s.forward_seconds / max(1, s.rounds) for s in stats)
    return sum(s.emitted for s in stats), sum(s.requests for s in stats), seconds


def _result(
    arm: str, concurrency: int, temperature: float, windows: Sequence[Window], plain: Sequence[Window]
) -> ArmResult:
    stats = [window.stats for window in windows]
    completions = [completion for window in windows for completion in window.completions]
    steps = max(1, sum(s.rounds for s in stats))
    requests = max(1, sum(s.requests for s in stats))
    propose, forward, accept, prefill = (
        sum(getattr(s, name) for s in stats) / steps
        for name in ("propose_seconds", "forward_seconds", "verify_seconds", "prefill_seconds")
    )
    whole = sum(window.seconds for window in windows) / steps
    by_completion = [
        (float(c.spec.accepted + c.spec.verify_steps), float(c.spec.verify_steps))
        for c in completions
        if c.spec.verify_steps
    ]
    rounds = [r for completion in completions for r in completion.rounds]
    if not by_completion:
        by_completion = [(float(s.emitted), float(s.requests)) for s in stats if s.requests]
    return ArmResult(
        arm=arm,
        concurrency=concurrency,
        temperature=temperature,
        rates=tuple(window.tokens_per_second for window in windows),
        ratio=_ratio(windows, plain, lambda window: window.tokens_per_second),
        decode_ratio=_ratio(windows, plain, lambda window: window.tokens_per_decode_second),
        tokens_per_step=ratio_of_sums(by_completion),
        accepted_at=accepted_at(rounds),
        accepted_from=accepted_from(rounds),
        nodes=sum(s.drafted for s in stats) / requests,
        propose_seconds=propose,
        forward_seconds=forward,
        accept_seconds=accept,
        other_seconds=max(0.0, whole - propose - forward - accept - prefill),
        prefill_seconds=prefill,
    )


def _ratio(windows: Sequence[Window], plain: Sequence[Window], rate: Callable[[Window], float]) -> Interval:
    return ratio_of([rate(window) for window in windows], [rate(window) for window in plain])
