"""Group advantages of GRPO (arXiv 2402.03300, section 4.1) and DAPO's overlong shaping (arXiv 2503.14476, section 3.4).

Rewards are Python floats and the arithmetic is in double precision: a group has a handful of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Normalise = Literal["std", "none"]

# Rewards that were equal before they went through float32 sums differ by a few units in the last place
# (1.2e-7 relative). Divided by their own standard deviation such residues would become advantages of +-1 and more.
RELATIVE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of one group.

    values: one per sample, 0 where the sample is excluded. included: which samples count.
    mean, std: over the included rewards, population standard deviation; 0 where nothing is included.
    zero_variance: no sample of this group carries a signal; all values are exactly 0.
    """

    values: tuple[float, ...]
    included: tuple[bool, ...]
    mean: float
    std: float
    zero_variance: bool


def group_advantages(
    rewards: Sequence[float], included: Sequence[bool], normalise: Normalise = "std"
) -> GroupAdvantages:
    """`R - mean(R)` over the included samples, divided by their population standard deviation unless told otherwise.

    A sample without a verdict (the verifier failed) is excluded: it changes neither the mean nor the deviation,
    and its advantage is 0. The population deviation is defined for a single sample, so a group with one
    included sample has advantage 0 and not NaN. A group whose rewards agree within `RELATIVE_TOLERANCE` of the
    largest magnitude has no variance.

    Raises ValueError where an included reward is not finite.
    """
    assert len(rewards) == len(included)
    kept = [float(r) for r, keep in zip(rewards, included, strict=True) if keep]
    if not all(math.isfinite(r) for r in kept):
        raise ValueError("rewards must be finite in every sample whose reward status is OK")
    flags = tuple(bool(keep) for keep in included)
    if not kept:
        return GroupAdvantages((0.0,) * len(flags), flags, 0.0, 0.0, zero_variance=True)
    mean = math.fsum(kept) / len(kept)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in kept) / len(kept))
    if max(kept) - min(kept) <= RELATIVE_TOLERANCE * max(abs(r) for r in kept):
        return GroupAdvantages((0.0,) * len(flags), flags, mean, std, zero_variance=True)
    scale = 1.0 / std if normalise == "std" else 1.0
    values = tuple((r - mean) * scale if keep else 0.0 for r, keep in zip(rewards, flags, strict=True))
    return GroupAdvantages(values, flags, mean, std, zero_variance=False)


def overlong_penalty(length: int, max_new_tokens: int, buffer: int) -> float:
    """DAPO's soft punishment (eq. 13), added to the reward.

    0 up to `max_new_tokens - buffer` tokens, from there linearly down to -1 at `max_new_tokens`.

    buffer: tokens; 0 turns the penalty off.
    """
    if buffer <= 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (max_new_tokens - buffer)) / buffer))
