"""Proposals that wait until their positions are verified, and what has become known of those that need not any more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of a law that a correction looks at, and candidates of a depth that are remembered.
TOP = 16
# Start of a round that was never proposed.
_NEVER = -(1 << 40)


def top_tokens(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The `TOP` most likely columns [B, ..., C] and their probabilities, of logits [B, ..., M] at temperatures [B]."""
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0).view(-1, *[1] * (logits.dim() - 1))
    top = scaled.topk(min(TOP, logits.shape[-1]), dim=-1)
    return top.indices, (top.values - scaled.logsumexp(-1, keepdim=True)).exp()


@dataclass(frozen=True, slots=True)
class Matured:
    """n proposals whose position has been verified.

    row: [n] int64, which of the verified positions each one met. heads: [n] int64, from 0. memo: [n, X], what was kept
    with the round. temperature: [n]. proposed, q: [n, C], the proposed law's most likely tokens and probabilities.
    target, p: [n, C'], the target's. candidates: [n, TOP] int64, the tree's tokens at the head's depth, all -1 where
    they are not kept. Tokens of -1 mean none.
    """

    row: Tensor
    heads: Tensor
    memo: Tensor
    temperature: Tensor
    proposed: Tensor
    q: Tensor
    target: Tensor
    p: Tensor
    candidates: Tensor

    def __len__(self) -> int:
        return len(self.row)

    @property
    def tokens(self) -> Tensor:
        """[n, C + C'] int64: the tokens of both laws. One that is in both stands there twice."""
        return torch.cat([self.proposed, self.target], dim=-1)

    @property
    def difference(self) -> Tensor:
        """[n, C + C'] float32: p - q, by `tokens`. A token that only one law has among its most likely ones counts with
        that law alone."""
        return torch.cat([-self.q, self.p], dim=-1)


class PendingProposals:
    """What was proposed for positions that are not verified yet, per slot.

    A round advances by a token at least, so after K rounds all K heads' proposals of a round have matured: a ring of K
    rounds holds everything. Allocated once. Tokens may be numbered in any way that does not change meanwhile.
    """

    def __init__(
        self, slots: int, heads: int, memo: int, device: torch.device | str = "cpu", *, candidates: bool = False
    ) -> None:
        """memo: numbers that are kept with each round. candidates: the tree's tokens are kept too."""
        self.start = torch.full((slots, heads), _NEVER, dtype=torch.int64, device=device)
        self.memo = torch.zeros(slots, heads, memo, device=device)
        self.temperature = torch.zeros(slots, heads, device=device)
        self.tokens = torch.full((slots, heads, heads, TOP), -1, dtype=torch.int64, device=device)
        self.q = torch.zeros(slots, heads, heads, TOP, device=device)
        kept = TOP if candidates else 0
        self.candidates = torch.full((slots, heads, heads, kept), -1, dtype=torch.int64, device=device)
        self._next = torch.zeros(slots, dtype=torch.int64, device=device)

    @property
    def bytes(self) -> int:
        tensors = (self.start, self.memo, self.temperature, self.tokens, self.q, self.candidates, self._next)
        return sum(t.numel() * t.element_size() for t in tensors)

    def reset(self, slot: int) -> None:
        """A new trajectory, or none, in this slot."""
        self.start[slot] = _NEVER
        self._next[slot] = 0

    def push(
        self,
        slots: Tensor,
        start: Tensor,
        memo: Tensor,
        temperature: Tensor,
        tokens: Tensor,
        q: Tensor,
        candidates: Tensor | None = None,
    ) -> None:
        """A round of B slots. start: [B] int64, the pending tokens' positions; memo: [B, X]; temperature: [B]; tokens,
        q: [B, K, C], the heads' most likely ones and their probabilities, C at most `TOP`; candidates: [B, K, TOP]."""
        place = self._next[slots]
        self.start[slots, place] = start
        self.memo[slots, place] = memo
        self.temperature[slots, place] = temperature
        self.tokens[slots, place] = F.pad(tokens, (0, TOP - tokens.shape[-1]), value=-1)
        self.q[slots, place] = F.pad(q.float(), (0, TOP - q.shape[-1]))
        if candidates is not None and self.candidates.shape[-1]:
            self.candidates[slots, place] = candidates
        self._next[slots] = (place + 1) % self.start.shape[1]

    def mature(self, slots: Tensor, positions: Tensor, tokens: Tensor, p: Tensor) -> Matured:
        """Proposals for verified positions: slots, positions: [n]; tokens: [n, C], the target's most likely ones there,
        -1 for one that could not be proposed; p: [n, C] their probabilities."""
        ahead = positions[:, None] - self.start[slots]  # [n, R]
        row, place = ((ahead >= 1) & (ahead <= self.start.shape[1])).nonzero(as_tuple=True)
        slot, head = slots[row], ahead[row, place] - 1
        return Matured(
            row=row,
            heads=head,
            memo=self.memo[slot, place],
            temperature=self.temperature[slot, place],
            proposed=self.tokens[slot, place, head],
            q=self.q[slot, place, head],
            target=tokens[row],
            p=p[row].float(),
            candidates=self.candidates[slot, place, head],
        )
