"""One calibrated scorer for every proposal: c = P(child is what the target emits | its parent was).

A count table holds hits and trials for cells of (the head's log q, the memory's probability, the longest matching
order, depth). Smoothed towards a closed form,

    c = (hits + 8 c0) / (trials + 8),    c0 = 1 - (1 - min(0.9, q^(1 / tau_d))) (1 - 0.6 P),

it serves from the first step and sharpens with feedback. With no counts it is one temperature tau_d per depth. A
node's score is the product of c along its path, so scores of different depths and proposers compare.

A second, small table predicts how often a *sampled* last child is accepted: its share of the probability that
the deterministic children leave, by depth and by the head's mass outside them.

Scores shape the tree only. They may be wrong, and the emitted law is still exact (`specroll_core/verify.py`).
"""

from __future__ import annotations

import base64
import math
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specroll_core.scorer_prior import TABLE

LOG_Q_EDGES = (-7.0, -5.0, -3.5, -2.5, -1.7, -1.0, -0.5, -0.15)
MEMORY_EDGES = (1e-4, 0.05, 0.15, 0.3, 0.45, 0.6, 0.8)
ORDER_EDGES = (1, 2, 3, 5)
DEPTH_EDGES = (2, 3, 5)
CELLS = 9 * 8 * 5 * 4

TAIL_MASS_EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.9)
TAIL_CELLS = 4 * 7

# A proposer that did not suggest a token is taken to give it this log-probability.
NO_LOG_Q = -20.0

# Weight of the closed form in trials, and the trials at which a cell starts to forget: about the last
# few hundred steps of a batch, so that scores follow the policy.
_PRIOR_TRIALS = 8.0
_WINDOW = 4096.0

# The closed form: most that a head's probability counts for, and the share of a memory's.
_HEAD_CAP = 0.9
_MEMORY_SHARE = 0.6

# Share of the probability left by the deterministic children that a draw captures: 0.2 to 0.35 was measured with
# heads after 7,000 rows, at temperature 1.
_PRIOR_TAIL = 0.3

# Bins of small numbers, which orders and depths are, ready for addition; beyond them the last bin goes on.
_TABLED = 16
LOG_Q_STRIDE, MEMORY_STRIDE = CELLS // 9, CELLS // 72
_ORDER_OFFSET = [4 * bisect_right(ORDER_EDGES, order) for order in range(_TABLED)]
_DEPTH_BIN = [bisect_right(DEPTH_EDGES, depth) for depth in range(_TABLED)]


# A shipped prior counts for at most so many trials per cell: enough for good shapes from the first step, and few
# enough to be outvoted within some hundred steps by another model's feedback.
PRIOR_TRIALS_KEPT = 64


class Score(NamedTuple):
    """c, and the cell to credit with the outcome (-1 for none)."""

    c: float
    cell: int


class Scorer(Protocol):
    """What the tree needs. Any values are safe: they decide shapes before anything is drawn."""

    def score_depths(self, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """log_q: [B, D, M]. Returns c [B, D, M] float32 and cells [B, D, M] int64 of candidates of heads alone."""
        ...

    def score(self, log_q: float, memory: float, order: int, depth: int) -> Score:
        """The score of one candidate that heads, memory or both suggest; depth 1 is below the root."""
        ...

    def tail(self, depth: int, mass: float, remainder: float) -> Score:
        """Probability that a sampled child at `depth` is accepted.

        mass: the head's probability outside the deterministic siblings. remainder: 1 - the sum of their c.
        """
        ...


class ScorerTables(NamedTuple):
    """All that a `CountTableScorer` computes with, for code that is not Python's. counts, tail_counts: [2, cells]
    float64, the scorer's own storage, which it goes on writing; powers: 1 / tau_d by depth."""

    log_q_edges: Sequence[float]
    memory_edges: Sequence[float]
    order_edges: Sequence[float]
    depth_edges: Sequence[float]
    tail_mass_edges: Sequence[float]
    counts: Tensor
    tail_counts: Tensor
    powers: Sequence[float]
    prior_trials: float
    head_cap: float
    memory_share: float
    tail_share: float
    no_log_q: float


class _Counts:
    """Hits and trials by cell, once as a tensor for whole batches of candidates and once as lists for single ones, of
    which a tensor's element takes as long to read as all else. What is credited is few numbers, so lists lead."""

    def __init__(self, cells: int) -> None:
        self.both = torch.zeros(2, cells, dtype=torch.float64)
        self._rows = self.both.numpy()  # the same storage
        self.hits, self.trials = [0.0] * cells, [0.0] * cells

    def set(self, hits: Tensor, trials: Tensor) -> None:
        self.both[0], self.both[1] = hits, trials
        self.hits, self.trials = self.both.tolist()

    def add(self, cells: Tensor, hits: Tensor, trials: Tensor | None) -> None:
        """cells, hits, trials: [n], None for 1 each. Entries with a negative cell or a hit of NaN are left out."""
        weights = [1.0] * len(cells) if trials is None else trials.tolist()
        credited = set()
        for cell, hit, trial in zip(cells.tolist(), hits.tolist(), weights, strict=True):
            if cell >= 0 and not math.isnan(hit):
                self.hits[cell] += hit
                self.trials[cell] += trial
                credited.add(cell)
        for cell in credited:
            if self.trials[cell] > _WINDOW:
                self.hits[cell] *= _WINDOW / self.trials[cell]
                self.trials[cell] = _WINDOW
            self._rows[:, cell] = self.hits[cell], self.trials[cell]


class CountTableScorer:
    """The count table and its prior. Not thread-safe: one per worker, updated between steps.

    temperatures: tau_d per depth, the last one for all deeper. 1.6 suits heads at temperature 0.6 to 1.
    """

    def __init__(self, temperatures: Sequence[float] = (1.6,), tail_share: float = _PRIOR_TAIL) -> None:
        if not temperatures or min(temperatures) <= 0:
            raise ValueError("temperatures must hold at least one positive number.")
        if not 0 <= tail_share <= 1:
            raise ValueError("tail_share must lie between 0 and 1.")
        self._power = [1 / t for t in temperatures]
        self._tail_share = tail_share
        self._candidates, self._tails = _Counts(CELLS), _Counts(TAIL_CELLS)
        self._constants: dict[tuple[int, torch.device], tuple[Tensor, Tensor, Tensor]] = {}

    @classmethod
    def with_prior(cls) -> CountTableScorer:
        """A scorer that starts from counts of replayed rollouts, at temperatures 0.6 and 1, rather than from none."""
        scorer = cls()
        data = torch.tensor(list(zlib.decompress(base64.b85decode(TABLE))), dtype=torch.float64)
        candidates, tails = data.split([2 * CELLS, 2 * TAIL_CELLS])
        for counts, table in ((scorer._candidates, candidates), (scorer._tails, tails)):
            rate, trials = table.view(2, -1)
            counts.set(rate / 255 * trials, trials)
        return scorer

    @property
    def counts(self) -> Tensor:
        """[2, CELLS] float64: hits and trials of deterministic children."""
        return self._candidates.both

    @property
    def tail_counts(self) -> Tensor:
        """[2, TAIL_CELLS] float64: of sampled ones, accepted and remaining probability."""
        return self._tails.both

    def tables(self) -> ScorerTables:
        return ScorerTables(
            LOG_Q_EDGES,
            MEMORY_EDGES,
            ORDER_EDGES,
            DEPTH_EDGES,
            TAIL_MASS_EDGES,
            self.counts,
            self.tail_counts,
            self._power,
            _PRIOR_TRIALS,
            _HEAD_CAP,
            _MEMORY_SHARE,
            self._tail_share,
            NO_LOG_Q,
        )

    def head_prior(self, log_q: Tensor) -> Tensor:
        """The closed form for candidates of heads alone. log_q: [B, D, M] float32. Returns the same."""
        return self._head_prior(log_q, self._by_depth(log_q.shape[1], log_q.device)[1])

    @staticmethod
    def _head_prior(log_q: Tensor, powers: Tensor) -> Tensor:
        return (log_q * powers).exp().clamp_max(_HEAD_CAP)

    def score_depths(self, log_q: Tensor) -> tuple[Tensor, Tensor]:
        edges, powers, bases = self._by_depth(log_q.shape[1], log_q.device)
        cells = torch.bucketize(log_q, edges, right=True) * LOG_Q_STRIDE + bases
        prior = self._head_prior(log_q, powers)
        hits, trials = self.counts.to(log_q.device, torch.float32)
        c = (hits[cells] + _PRIOR_TRIALS * prior) / (trials[cells] + _PRIOR_TRIALS)
        return c, cells

    def score(self, log_q: float, memory: float, order: int, depth: int) -> Score:
        # Called for every candidate of a memory: tables instead of searches, and no check in making the tuple.
        table = self._candidates
        cell = (
            bisect_right(LOG_Q_EDGES, log_q) * LOG_Q_STRIDE
            + bisect_right(MEMORY_EDGES, memory) * MEMORY_STRIDE
            + (_ORDER_OFFSET[order] if order < _TABLED else _ORDER_OFFSET[-1])
            + (_DEPTH_BIN[depth] if depth < _TABLED else _DEPTH_BIN[-1])
        )
        powers = self._power
        from_head = math.exp(log_q * (powers[depth - 1] if depth <= len(powers) else powers[-1]))
        prior = 1 - (1 - (from_head if from_head < _HEAD_CAP else _HEAD_CAP)) * (1 - _MEMORY_SHARE * memory)
        c = (table.hits[cell] + _PRIOR_TRIALS * prior) / (table.trials[cell] + _PRIOR_TRIALS)
        return tuple.__new__(Score, (c, cell))

    def _by_depth(self, depths: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The edges of log q; 1 / tau_d [D, 1]; the first cell of each depth [D, 1] int64. Made once."""
        made = self._constants.get((depths, device))
        if made is None:
            powers = [[self._power[min(d, len(self._power) - 1)]] for d in range(depths)]
            bases = [[_cell(0, 0, 0, _depth_bin(d + 1))] for d in range(depths)]
            made = self._constants[depths, device] = (
                torch.tensor(LOG_Q_EDGES, device=device),
                torch.tensor(powers, device=device),
                torch.tensor(bases, dtype=torch.int64, device=device),
            )
        return made

    def tail(self, depth: int, mass: float, remainder: float) -> Score:
        cell = _depth_bin(depth) * (len(TAIL_MASS_EDGES) + 1) + bisect_right(TAIL_MASS_EDGES, mass)
        table = self._tails
        share = (table.hits[cell] + _PRIOR_TRIALS * self._tail_share) / (table.trials[cell] + _PRIOR_TRIALS)
        return Score(max(0.0, remainder) * min(1.0, share), cell)

    def update(self, cells: Tensor, probabilities: Tensor) -> None:
        """Credits deterministic children whose parent was emitted.

        cells: [n] int64; probabilities: [n], the target's probability of each, which is the hit rate without
        the noise of one draw. Entries with a negative cell or a probability of NaN are left out.
        """
        self._candidates.add(cells, probabilities, None)

    def update_tails(self, cells: Tensor, accepted: Tensor, remainder: Tensor) -> None:
        """Credits sampled children whose parent was emitted.

        cells: [n] int64; accepted: [n], the exact probability that the draw was accepted; remainder: [n],
        the target's mass outside the deterministic siblings. Left out are the same entries as there.
        """
        self._tails.add(cells, accepted, remainder)

    def halve(self) -> None:
        """Halves the evidence: the heads have changed and old counts are only a guess."""
        for counts in (self._candidates, self._tails):
            counts.set(*(counts.both / 2))


def _depth_bin(depth: int) -> int:
    return bisect_right(DEPTH_EDGES, depth)


def _cell(log_q_bin: int, memory_bin: int, order_bin: int, depth_bin: int) -> int:
    return ((log_q_bin * 8 + memory_bin) * 5 + order_bin) * 4 + depth_bin
