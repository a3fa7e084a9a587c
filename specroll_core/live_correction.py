"""The correction while trajectories are generated: who has which slot, what waits, and what is learned.

Three calls make a round, in this order: `correct` before the proposals are ranked, `note` once they are, `learn` after
the verification. So what moves a proposal was verified in earlier rounds, and no draw of the round itself is seen.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specroll_core.corrector import Corrector
from specroll_core.pending import TOP, PendingProposals
from specroll_core.seen_laws import Laws
from specroll_core.slot_pool import SlotPool
from specroll_core.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Learner:
    """A request of the batch whose states are corrected. row: in the batch. key: of the request, the same after a
    retraction. group: of the weights that siblings share, None for weights of its own."""

    row: int
    key: Hashable
    group: Hashable | None = None


@dataclass(frozen=True, slots=True)
class Corrected:
    """places: the rows of the batch that have slots; rows: [n] int64, the same. own, weights: [n] int64, slots of the
    pending proposals and of what is learned. states: [n, K, H]. memo: [n, X]."""

    places: tuple[int, ...]
    rows: Tensor
    own: Tensor
    weights: Tensor
    states: Tensor
    memo: Tensor

    def __len__(self) -> int:
        return len(self.places)


class LiveCorrection:
    """State of a fixed number of requests, allocated once. Not thread-safe: called between the steps of one scheduler.

    A request keeps its slots through retraction. It gives them back when it ends; one whose end is never told loses
    them when others need them. A group's weights stay for siblings to come until others need them.
    """

    def __init__(self, corrector: Corrector, slots: int, heads: int, device: torch.device | str = "cpu") -> None:
        """corrector: with as many slots."""
        self.corrector = corrector
        self._device = device
        self._pending = PendingProposals(slots, heads, corrector.memo, device, candidates=corrector.wants_candidates)
        self._own, self._weights = SlotPool(slots), SlotPool(slots)

    @property
    def bytes(self) -> int:
        return self.corrector.bytes + self._pending.bytes

    def __len__(self) -> int:
        """Requests that something is kept for."""
        return len(self._own)

    def correct(self, learners: Sequence[Learner], z: Tensor, h: Tensor, e: Tensor) -> Corrected | None:
        """Begins a round. learners: in the order of the batch; z: [B, K, H], h, e: [B, H], of the whole batch. None
        where nobody has slots."""
        self._own.next_round()
        self._weights.next_round()
        found: list[tuple[int, int, int]] = []
        for learner in learners:
            own, new = self._own.take(learner.key)
            if own < 0:
                continue
            if new:
                self._pending.reset(own)
            name = ("group", learner.group) if learner.group is not None else ("own", learner.key)
            weights, new = self._weights.take(name)
            if weights < 0:
                continue
            if new:
                self.corrector.reset(weights)
            found.append((learner.row, own, weights))
        if not found:
            return None
        rows, own_slots, weight_slots = torch.tensor(found, device=self._device).T.contiguous()
        states, memo = self.corrector.correct(weight_slots, z[rows], h[rows], e[rows])
        places = tuple(row for row, _, _ in found)
        return Corrected(places, rows, own_slots, weight_slots, states, memo)

    def note(
        self,
        corrected: Corrected,
        start: Tensor,
        temperature: Tensor,
        tokens: Tensor,
        q: Tensor,
        tree: DraftTree | None = None,
    ) -> None:
        """What was proposed from the corrected states. start, temperature: [n], the pending tokens' positions and what
        the laws were taken at; tokens, q: [n, K, C], the likely ones, C at most `TOP`; tree: of the whole batch."""
        candidates = None
        if self.corrector.wants_candidates and tree is not None:
            candidates = candidates_of(tree, tokens.shape[1])[corrected.rows]
        self._pending.push(corrected.own, start, corrected.memo, temperature, tokens, q, candidates)

    def learn(self, corrected: Corrected, start: Tensor, laws: Laws) -> None:
        """Ends a round. start: [n], the pending tokens' positions; laws: of these requests, by rows of the batch."""
        # The rows ascend, and each law is of one of them.
        at = torch.searchsorted(corrected.rows, laws.request)
        matured = self._pending.mature(corrected.own[at], start[at] + laws.ahead, laws.tokens, laws.p)
        if len(matured):
            self.corrector.learn(corrected.weights[at[matured.row]], matured)

    def close(self, key: Hashable) -> None:
        """A request has ended."""
        self._own.release(key)
        self._weights.release(("own", key))

    def halve(self) -> None:
        """The heads have changed."""
        self.corrector.halve()


def candidates_of(tree: DraftTree, heads: int) -> Tensor:
    """[B, K, TOP] int64: tokens of each tree's nodes at depths 1 to K, each once or more, -1 beyond."""
    found = []
    for depth in range(1, heads + 1):
        here = torch.where(tree.valid & (tree.depths == depth), tree.tokens, -1)
        most = here.topk(min(TOP, here.shape[1]), dim=1).values
        found.append(torch.nn.functional.pad(most, (0, TOP - most.shape[1]), value=-1))
    return torch.stack(found, dim=1)
