"""What a step costs, learned while serving: seconds by the number of requests and of nodes for each.

One median per power-of-two bucket, over a window of recent steps, so that a stall or a compilation does not move it.
Between buckets the cost is interpolated over log2 of the tokens, and it never falls with more tokens: a
measured dip is noise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from statistics import median

# Recent steps per bucket: TLT (arXiv 2511.16665) takes the median over 300.
_WINDOW = 300


class StepTimeModel:
    """Step time as a function of total tokens (requests x nodes).

    Beyond the largest bucket known the cost grows in proportion to the tokens, so that an untried width never
    looks cheap; below the smallest it stays.
    """

    def __init__(self, window: int = _WINDOW) -> None:
        if window < 1:
            raise ValueError("window must be at least 1.")
        self._window = window
        self._times: dict[int, deque[float]] = {}
        self._curve: list[tuple[float, float]] | None = None

    @property
    def known(self) -> bool:
        """Whether anything has been measured."""
        return bool(self._times)

    def record(self, tokens: int, seconds: float) -> None:
        """One measured step. Values that are not positive and finite are left out."""
        if not (math.isfinite(seconds) and seconds > 0 and tokens >= 1):
            return
        bucket = bucket_of(tokens)
        self._times.setdefault(bucket, deque(maxlen=self._window)).append(seconds)
        self._curve = None

    def seed(self, times: Mapping[int, float]) -> None:
        """Takes calibration points (tokens -> seconds) as one measurement each."""
        for tokens, seconds in times.items():
            self.record(tokens, seconds)

    def predict(self, tokens: int) -> float:
        """Seconds of a step of `tokens` tokens. Without any measurement, 1 at every size."""
        curve = self._points()
        if not curve:
            return 1.0
        x = math.log2(tokens)
        if x <= curve[0][0]:
            return curve[0][1]
        if x >= curve[-1][0]:
            return curve[-1][1] * 2 ** (x - curve[-1][0])
        for (x0, y0), (x1, y1) in pairwise(curve):
            if x <= x1:
                return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        raise AssertionError("the curve is sorted")

    def measured(self, tokens: int) -> bool:
        """Whether the bucket of `tokens` has been measured."""
        return bucket_of(tokens) in self._times

    def measurements(self, tokens: int) -> int:
        """How many recent steps the bucket of `tokens` holds."""
        return len(self._times.get(bucket_of(tokens), ()))

    def _points(self) -> list[tuple[float, float]]:
        if self._curve is None:
            floor = 0.0
            self._curve = []
            for bucket in sorted(self._times):
                floor = max(floor, median(self._times[bucket]))
                self._curve.append((float(bucket), floor))
        return self._curve


class RoundTimes:
    """Time of a round of B requests with N nodes each.

    Plain rounds are another code path than drafting ones, and what a drafting round spends beside its forward grows
    with B as much as with B N: so there is a curve over B for every N. Where an N has no measurement yet, the curve
    over all drafting rounds' tokens stands in for it.
    """

    def __init__(self, window: int = _WINDOW) -> None:
        self._window = window
        self._by_nodes: dict[int, StepTimeModel] = {}
        self._drafting = StepTimeModel(window)

    @property
    def known(self) -> bool:
        """Whether anything has been measured."""
        return any(curve.known for curve in self._by_nodes.values())

    def record(self, batch: int, nodes: int, seconds: float) -> None:
        self._curve(nodes).record(batch, seconds)
        if nodes > 1:
            self._drafting.record(batch * nodes, seconds)

    def predict(self, batch: int, nodes: int) -> float:
        """Seconds. Drafting is never taken to be cheaper than a plain round."""
        plain = self._curve(1).predict(batch)
        if nodes == 1:
            return plain
        curve = self._curve(nodes)
        known = curve.measured(batch)
        return max(plain, curve.predict(batch) if known else self._stand_in(batch * nodes, plain, batch))

    def measurements(self, batch: int, nodes: int) -> int:
        """How many of the window's rounds were of about this size."""
        return self._curve(nodes).measurements(batch)

    def _stand_in(self, tokens: int, plain: float, batch: int) -> float:
        if self._drafting.known:
            return self._drafting.predict(tokens)
        # Nothing but plain rounds is known: their own curve over tokens, a forward of as many.
        return self._curve(1).predict(tokens) if tokens > batch else plain

    def _curve(self, nodes: int) -> StepTimeModel:
        return self._by_nodes.setdefault(nodes, StepTimeModel(self._window))


def bucket_of(tokens: int) -> int:
    """The power of two nearest to `tokens` on a logarithmic scale, as its exponent."""
    return round(math.log2(tokens))
