"""What a step costs: seconds by the total number of tokens in the forward, learned while serving.

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

    def _points(self) -> list[tuple[float, float]]:
        if self._curve is None:
            floor = 0.0
            self._curve = []
            for bucket in sorted(self._times):
                floor = max(floor, median(self._times[bucket]))
                self._curve.append((float(bucket), floor))
        return self._curve


def bucket_of(tokens: int) -> int:
    """The power of two nearest to `tokens` on a logarithmic scale, as its exponent."""
    return round(math.log2(tokens))
