"""What was measured, as numbers with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from services.rollout.completion import Round
from specroll_core.sources import Source

_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with a 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One way of decoding at one concurrency and temperature.

    rates: tokens per second of each window. ratio: to plain decoding's windows of the same turns; decode_ratio: the
    same without the time that prompts took, which the bound knows nothing of. tokens_per_step: per request, over
    completions. accepted_at: share of steps that accepted at least 1, 2, ... drafted tokens;
    accepted_from: the same by who proposed the token at that depth. nodes: mean beside the root. Seconds of a mean
    step: propose, the target's forward, accept (for plain decoding: sampling), all that is outside of the algorithm,
    and prefill, which is no part of a step.
    """

    arm: str
    concurrency: int
    temperature: float
    rates: tuple[float, ...]
    ratio: Interval
    decode_ratio: Interval
    tokens_per_step: Interval
    accepted_at: tuple[float, ...]
    accepted_from: dict[str, tuple[float, ...]]
    nodes: float
    propose_seconds: float
    forward_seconds: float
    accept_seconds: float
    other_seconds: float
    prefill_seconds: float

    @property
    def rate(self) -> float:
        return median(self.rates)

    @property
    def overhead(self) -> float:
        """Share of a step that proposing and accepting take."""
        step = self.propose_seconds + self.forward_seconds + self.accept_seconds + self.other_seconds
        return (self.propose_seconds + self.accept_seconds) / step if step else 0.0


@dataclass(frozen=True, slots=True)
class Bound:
    """What speculation could gain if all but the target's forward were free.

    `max_N A(N) t(B, 1) / t(B, N)` over the measured widths: curve[n] is (tokens per step and request, forward seconds
    of a step) with n nodes beside the root; curve[0] is plain decoding.
    """

    concurrency: int
    temperature: float
    curve: Mapping[int, tuple[float, float]]

    @property
    def value(self) -> float:
        plain = self.curve[0][1]
        return max(tokens * plain / seconds for tokens, seconds in self.curve.values())


@dataclass(frozen=True, slots=True)
class Curve:
    """What was seen with fixed widths at one concurrency: points[n] is (tokens, requests times steps, forward seconds
    of a step) with n nodes beside the root."""

    concurrency: int
    temperature: float
    points: Mapping[int, tuple[int, int, float]]


def bounds_of(curves: Sequence[Curve]) -> list[Bound]:
    """One for each curve. How much is accepted depends on the prompts and the width, not on how many requests are in
    flight, so A(N) is taken over all curves of a temperature: of few requests alone, the best of several widths would
    be the luckiest one."""
    bounds = []
    for curve in curves:
        alike = [other.points for other in curves if other.temperature == curve.temperature]
        points = {}
        for width, (_, _, seconds) in curve.points.items():
            tokens, steps = (sum(p[width][i] for p in alike if width in p) for i in (0, 1))
            points[width] = tokens / max(1, steps), seconds
        bounds.append(Bound(curve.concurrency, curve.temperature, points))
    return bounds


@dataclass(slots=True)
class BenchResult:
    """environment: what the figures depend on, for whoever reads them. complete: whether every cell was measured."""

    environment: dict[str, str | int | float | bool | None]
    arms: list[ArmResult] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    hf: dict[int, float] = field(default_factory=dict)
    complete: bool = False

    def bound(self, concurrency: int, temperature: float) -> Bound | None:
        return next((b for b in self.bounds if (b.concurrency, b.temperature) == (concurrency, temperature)), None)


def ratio_of(rates: Sequence[float], plain: Sequence[float], seed: int = 0) -> Interval:
    """Ratio of the medians of windows that were taken in turn; the bootstrap draws turns, so that what disturbed both
    sides of a turn cancels."""
    pairs = torch.tensor(list(zip(rates, plain, strict=True)), dtype=torch.float64)
    return _interval(pairs, lambda drawn: drawn[..., 0].quantile(0.5, -1) / drawn[..., 1].quantile(0.5, -1), seed)


def ratio_of_sums(pairs: Sequence[tuple[float, float]], seed: int = 0) -> Interval:
    """Sum of the first over sum of the second, with an interval over the pairs."""
    if not pairs:
        return Interval(float("nan"), float("nan"), float("nan"))
    table = torch.tensor(list(pairs), dtype=torch.float64)
    return _interval(table, lambda drawn: drawn[..., 0].sum(-1) / drawn[..., 1].sum(-1), seed)


def gain_of(sums: Sequence[tuple[float, float]], base: Sequence[tuple[float, float]], seed: int = 0) -> Interval:
    """Ratio of two `ratio_of_sums` less one; both of the same prompts, which are drawn together."""
    table = torch.tensor([[*a, *b] for a, b in zip(sums, base, strict=True)], dtype=torch.float64)

    def gain(drawn: torch.Tensor) -> torch.Tensor:
        tokens, steps, base_tokens, base_steps = drawn.sum(-2).unbind(-1)
        return (tokens / steps) / (base_tokens / base_steps) - 1

    return _interval(table, gain, seed)


def _interval(table: torch.Tensor, statistic, seed: int) -> Interval:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(table), (_DRAWS, len(table)), generator=generator)
    low, high = statistic(table[chosen]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(statistic(table)), low, high)


def accepted_at(rounds: Sequence[Round]) -> tuple[float, ...]:
    """Share of the steps that accepted at least 1, 2, ... tokens."""
    accepted = [r.accepted for r in rounds]
    deepest = max(accepted, default=0)
    return tuple(sum(a >= depth for a in accepted) / len(accepted) for depth in range(1, deepest + 1))


def accepted_from(rounds: Sequence[Round]) -> dict[str, tuple[float, ...]]:
    """Share of the steps that accepted a token of each source at depth 1, 2, ...; sources of nothing are left out."""
    deepest = max((r.accepted for r in rounds), default=0)
    counts = {source: [0] * deepest for source in Source}
    for r in rounds:
        for depth, source in enumerate(r.sources):
            counts[Source(source)][depth] += 1
    return {s.name.lower(): tuple(n / len(rounds) for n in row) for s, row in counts.items() if any(row)}
