"""How many nodes to verify per request, and when none: the most tokens per second that the step can give.

With B requests and N nodes each (root included), a step emits about B A(N) tokens and takes t(B, N) seconds. A comes
from the scorer's calibrated path probabilities, corrected by what was observed; t from `cost.py`. The best N is
taken of `BUDGETS`; N = 1 is plain decoding. Speculation starts for a predicted gain of at least 5 % (EfficientRollout,
arXiv 2606.18967), stops below 0, and another N must be better by 2 %.

Rounds differ: where a memory has found the place the text comes from, twenty nodes pay, and in the next round two. So
while speculation is on, trees are grown two budgets larger than the one that is best on average, and each round's
probabilities decide how much of them is verified. With Lambda the tokens per second of late, the N that maximises

    tokens(N) - Lambda t(B, N)

maximises the ratio of all tokens to all time (Dinkelbach 1967), which the best ratio of every single round does not.

Exploration (an epsilon-greedy bandit as in TLT, 2511.16665) keeps predictions honest, but only neighbours of the
chosen N and plain decoding are tried, and only while all exploring has cost less than 1 % of the time so far.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from specroll_core.cost import RoundTimes

BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24)

_START_GAIN = 1.05
_STOP_GAIN = 1.0
_SWITCH_GAIN = 1.02
_EXPLORE_SHARE = 0.01

# Plain rounds of about the same batch size before anything is compared with them: one may have been interrupted.
_PLAIN_ROUNDS = 4

# Budgets that trees are grown beyond the one that is best on average.
_REACH = 2

# Weight of one step in the running means: about the last hundred steps.
_SMOOTHING = 0.02


def prior_budget(batch: int, peak_tokens: int, budgets: Sequence[int] = BUDGETS) -> int:
    """The budget before anything is measured: the largest with batch x N at most `peak_tokens`, 512 on a large GPU
    (FastGRPO, arXiv 2509.21792), else 1."""
    return max((n for n in budgets if batch * n <= peak_tokens), default=1)


class AcceptanceModel:
    """A(N): expected tokens per round and request with N nodes, for every N at once.

    A tree grown best-first holds the smaller trees in its beginning, so the sorted path probabilities of one tree
    give the curve. It is averaged over rounds and scaled by observed / predicted.
    """

    def __init__(self, largest: int = BUDGETS[-1]) -> None:
        self._gains = [0.0] * (largest - 1)
        self._weights = [0.0] * (largest - 1)
        self._observed = self._predicted = 0.0

    def observe(
        self, path_scores: Sequence[Sequence[float]], lengths: Sequence[int], verified: int | None = None
    ) -> None:
        """One round. path_scores[b]: P(node emitted) of request b's nodes beside the root; lengths[b]: tokens that it
        emitted, the bonus included; verified: how many of these nodes were, the first ones, None for all. Scores of 0
        are padding; requests without nodes are left out."""
        rows = [(sorted((x for x in s if x > 0), reverse=True), n) for s, n in zip(path_scores, lengths, strict=True)]
        drafted = [(s, n) for s, n in rows if s]
        if not drafted:
            return
        for rank in range(min(len(self._gains), max(len(s) for s, _ in drafted))):
            here = [s[rank] for s, _ in drafted if len(s) > rank]
            mean = sum(here) / len(here)
            self._weights[rank] += _SMOOTHING * (1 - self._weights[rank])
            self._gains[rank] += _SMOOTHING * (mean - self._gains[rank])
        predicted = sum(sum(s[:verified]) for s, _ in drafted) / len(drafted)
        observed = sum(n - 1 for _, n in drafted) / len(drafted)
        self._predicted += _SMOOTHING * (predicted - self._predicted)
        self._observed += _SMOOTHING * (observed - self._observed)

    @property
    def known(self) -> bool:
        return self._weights[0] > 0

    def expected(self, nodes: int) -> float:
        """Tokens per round with `nodes` nodes, at least 1 and never falling in `nodes`.

        Ranks that were never drafted continue the last known one, halved per doubling of the rank.
        """
        total, last, last_rank = 0.0, 0.0, 1
        for rank in range(nodes - 1):
            if self._weights[rank] > 0:
                last, last_rank = self._gains[rank] / self._weights[rank], rank + 1
                total += last
            else:
                total += last * last_rank / (rank + 1)
        return 1.0 + total * self.correction

    @property
    def correction(self) -> float:
        """Observed over predicted tokens beside the bonus."""
        return self._observed / self._predicted if self._predicted > 0 else 1.0


class BudgetPolicy:
    """Chooses N for every step. Deterministic for a seed and a history; one per worker.

    budgets: allowed values, ascending, 1 among them (with CUDA graphs, the captured widths). peak_tokens: the prior's.
    """

    def __init__(
        self, budgets: Sequence[int] = BUDGETS, peak_tokens: int = 32, epsilon: float = 0.1, seed: int = 0
    ) -> None:
        if list(budgets) != sorted(set(budgets)) or not budgets or budgets[0] != 1:
            raise ValueError("budgets must be ascending and begin with 1 (plain decoding).")
        if not 0 <= epsilon <= 1:
            raise ValueError("epsilon must lie between 0 and 1.")
        self.budgets = tuple(budgets)
        self.times = RoundTimes()
        self.acceptance = AcceptanceModel(max(2, self.budgets[-1]))
        self._peak = peak_tokens
        self._epsilon = epsilon
        self._random = random.Random(seed)  # noqa: S311 - exploration, nothing secret
        self._current: dict[int, int] = {}
        self._spent = self._elapsed = 0.0
        self._exploring: float | None = None
        # By batch size: tokens and seconds of late, as predicted.
        self._flow: dict[int, tuple[float, float]] = {}

    def choose(self, batch: int) -> int:
        """N for a step of `batch` requests. Steps of similar batch sizes share their hysteresis."""
        assert batch >= 1
        self._exploring = None
        key = batch.bit_length()
        best = self._best(batch, self._current.get(key))
        self._current[key] = best
        return self._explore(batch, best)

    def reach(self, chosen: int) -> int:
        """How large trees are to be grown for a round for which `choose` said `chosen`; `fit` then decides."""
        if chosen == 1 or self._exploring is not None:
            return chosen
        return self.budgets[min(self.budgets.index(chosen) + _REACH, len(self.budgets) - 1)]

    def fit(self, batch: int, scores: Sequence[Sequence[float]]) -> int:
        """How many nodes, the root included, a round is to verify: one of the budgets.

        scores[b]: P(emitted) of the nodes beside the root that were found for request b, best first. 1 only where none
        was found: proposing has been paid for.
        """
        found = max(map(len, scores), default=0)
        gains = [sum(s[rank] for s in scores if rank < len(s)) for rank in range(found)]
        tokens = [batch + self.acceptance.correction * total for total in accumulate(gains, initial=0.0)]
        last = next(n for n in (*self.budgets, found + 1) if n > found)  # holds all that was found
        times = {n: self.times.predict(batch, n) for n in self.budgets if 1 < n <= last}
        if not found or not times:
            return 1

        def emitted(nodes: int) -> float:
            return tokens[min(nodes - 1, found)]

        key = batch.bit_length()
        flow = self._flow.get(key)
        # A first guess of the rate is that of this round's best; each round brings it nearer to the long run's.
        rate = flow[0] / flow[1] if flow is not None else max(emitted(n) / t for n, t in times.items())
        best = max(times, key=lambda n: emitted(n) - rate * times[n])
        before = flow or (emitted(best), times[best])
        self._flow[key] = (
            before[0] + _SMOOTHING * (emitted(best) - before[0]),
            before[1] + _SMOOTHING * (times[best] - before[1]),
        )
        return best

    def record(self, batch: int, nodes: int, seconds: float, once: float = 0.0) -> None:
        """The measured time of the step that was chosen last.

        once: seconds beside it that another step like it would not take, such as a memory's taking in of what was
        emitted while nothing was drafted. They count as time spent, not as what such a step costs: where drafting is
        tried now and then only, it would never look as cheap as it is.
        """
        self.times.record(batch, nodes, seconds)
        self._elapsed += seconds + once
        if self._exploring is not None:
            self._spent += max(0.0, seconds + once - self._exploring)
            self._exploring = None

    def gain(self, batch: int, nodes: int) -> float:
        """Predicted tokens per second relative to plain decoding."""
        return self.acceptance.expected(nodes) * self.times.predict(batch, 1) / self.times.predict(batch, nodes)

    def _best(self, batch: int, current: int | None) -> int:
        if self.times.measurements(batch, 1) < _PLAIN_ROUNDS:
            return 1  # every gain is relative to plain decoding here
        if not self.acceptance.known:
            return prior_budget(batch, self._peak, self.budgets)
        gains = {n: self.gain(batch, n) for n in self.budgets}
        best = max(self.budgets, key=lambda n: (gains[n], -n))
        if current is None or current == 1:
            return best if gains[best] >= _START_GAIN else 1
        if gains[best] < _STOP_GAIN or best == 1:
            return 1
        return best if gains[best] >= _SWITCH_GAIN * gains[current] else current

    def _explore(self, batch: int, best: int) -> int:
        if self._random.random() >= self._epsilon or self._spent > _EXPLORE_SHARE * self._elapsed:
            return best
        at = self.budgets.index(best)
        neighbours = [self.budgets[i] for i in (at - 1, at + 1) if 0 <= i < len(self.budgets)]
        if best != 1 and 1 not in neighbours:
            neighbours.append(1)
        if not neighbours:
            return best
        tried = self._random.choice(neighbours)
        # What the same tokens would have cost with the best budget.
        rate = self.acceptance.expected(tried) / self.acceptance.expected(best)
        self._exploring = self.times.predict(batch, best) * rate
        return tried
