"""How far the policy has moved on from what heads have last learned from, or were last judged on, in training rows.

A policy that becomes more predictable is accepted more often by heads that fall ever further behind: no fall tells of
it, so that only a training can, and the gate.
"""

from __future__ import annotations

# The first attempt comes after so many rows of later policies, as a share of those that training begins with: a policy
# may have settled before there are more.
_FIRST = 0.25


class Progress:
    """The first attempt is made after few rows of policies later than `covered`; each that brought nothing doubles
    what the next one waits for, up to `min_rows`, and one that brought better heads makes it as short as at first.

    min_rows: that training begins with. covered: the newest policy that was learned from, None before anything is
    known. stride: rows of later policies that the next attempt waits for.
    """

    def __init__(self, min_rows: int, *, covered: int | None = None, stride: int | None = None) -> None:
        self._first, self._longest = max(1, round(_FIRST * min_rows)), min_rows
        self.covered = covered
        self.stride = min(stride or self._first, self._longest)

    def tried(self, policy: int, *, better: bool) -> None:
        """A training on rows up to `policy` has come to an end. better: its heads serve."""
        self.covered = policy if self.covered is None else max(policy, self.covered)
        self.stride = self._first if better else min(2 * self.stride, self._longest)

    def begin_again(self) -> None:
        """Other heads serve, which have learned from nobody knows which policies."""
        self.covered, self.stride = None, self._first
