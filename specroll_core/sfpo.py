"""Slow-fast policy optimisation (arXiv 2510.04072): several updates on one batch without drifting far from it.

A step from weights theta_0 is: K fast updates on the batch, giving theta_K; reposition to
`theta_0 + alpha (theta_K - theta_0)`; one slow update from there. Alpha falls to 0, which is plain GRPO, once the
policy's entropy leaves its recent range: from then on the extra updates overfit the batch.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor


class AlphaSchedule:
    """alpha until the first step whose entropy has a z-score of at least `tau` against the last `window` steps; then 0.

    The score needs a full window. Entropies of a constant policy have no spread, and then the score is 0.
    """

    def __init__(self, alpha: float, window: int, tau: float) -> None:
        self._alpha, self._tau = alpha, tau
        self._recent: deque[float] = deque(maxlen=window)
        self._stopped = False

    @property
    def alpha(self) -> float:
        return 0.0 if self._stopped else self._alpha

    def observe(self, entropy: float) -> float:
        """Takes the mean token entropy of a step, in nats; returns its z-score."""
        z = 0.0
        if len(self._recent) == self._recent.maxlen:
            spread = statistics.pstdev(self._recent)
            z = (entropy - statistics.fmean(self._recent)) / spread if spread > 0 else 0.0
            self._stopped = self._stopped or abs(z) >= self._tau
        self._recent.append(entropy)
        return z

    def state(self) -> dict[str, object]:
        return {"recent": list(self._recent), "stopped": self._stopped}

    def load_state(self, state: dict[str, object]) -> None:
        recent = state["recent"]
        assert isinstance(recent, list)
        self._recent = deque(recent, maxlen=self._recent.maxlen)
        self._stopped = bool(state["stopped"])


def reposition(start: Sequence[Tensor], fast: Sequence[Tensor], alpha: float) -> list[Tensor]:
    """`start + alpha (fast - start)`, tensor by tensor."""
    return [torch.lerp(a, b, alpha) for a, b in zip(start, fast, strict=True)]
