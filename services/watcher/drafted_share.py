"""How much of what is generated was drafted: where it is next to nothing, checks come too late to find a fall.

A budget drafts nothing where a verified token costs more than it brings, in a large batch say. Heads that have fallen
behind the policy make that more frequent, so that nothing would ever tell that better ones were possible.
"""

from __future__ import annotations

from specroll.v1 import feedback_pb2

# Of all tokens: with fewer, checks take four times as long as they are meant to, and more.
_ENOUGH = 0.25


class DraftedShare:
    """Judged over stretches of `tokens` tokens; each is twice as long as one that was blind before it, `longest` at
    most, so that a run that never drafts is not trained for all the time.

    last: the share in the stretch that ended last.
    """

    def __init__(self, tokens: float, longest: float) -> None:
        self._first, self._longest = tokens, max(tokens, longest)
        self._stretch = tokens
        self._tokens = self._drafted = 0
        self.last = 1.0

    def add(self, trajectory: feedback_pb2.TrajectoryFeedback) -> None:
        """A round that accepted a nodes brought a + 1 tokens."""
        self._tokens += trajectory.tokens
        self._drafted += sum(count * (a + 1) for cell in trajectory.rounds for a, count in enumerate(cell.accepted))

    def found_blind(self) -> bool:
        """Whether a stretch has ended since the last call, and too little was drafted in it."""
        if self._tokens < self._stretch:
            return False
        self.last = self._drafted / self._tokens
        self._tokens = self._drafted = 0
        blind = self.last < _ENOUGH
        self._stretch = min(2 * self._stretch, self._longest) if blind else self._first
        return blind
