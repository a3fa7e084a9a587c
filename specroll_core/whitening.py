"""Directions that move one logit each: whitened rows of an LM head.

With m the mean row and C the rows' covariance under token frequencies f,

    P = (C + w tr(C) / H I)^-1,    D_v = P (W_v - m) / ((W_v - m)' P (W_v - m)):

one unit along D_v adds one to logit v and little elsewhere. Plain rows share large common directions, and a step along
one of them moves every logit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def whitened_rows(rows: Tensor, frequency: Tensor, whitening: float = 0.1) -> Tensor:
    """D [M, H] float32. rows: [M, H], the LM head's rows of the proposal vocabulary; frequency: [M], how often each
    token occurs in recent rollouts, in any unit; whitening: w. Once per LM head, off the serving path: M H^2 products.
    """
    rows = rows.float()
    share = frequency.to(rows) / frequency.sum()
    centred = rows - share @ rows
    covariance = (centred * share[:, None]).T @ centred
    H = rows.shape[1]
    covariance += whitening * covariance.trace() / H * torch.eye(H, device=rows.device)
    directions = torch.linalg.solve(covariance, centred.T).T
    scale = (directions * centred).sum(-1, keepdim=True).clamp_min(1e-12)
    whitened: Tensor = directions / scale
    return whitened


@dataclass(frozen=True, slots=True)
class Directions:
    """A direction for each of some tokens. rows: [M, H] float32; inverse: [V] int64, a token's row, -1 for none."""

    rows: Tensor
    inverse: Tensor

    @staticmethod
    def of(rows: Tensor, ids: Tensor, vocab: int) -> Directions:
        """rows: [M, H], the directions of the tokens `ids` [M] int64, of a vocabulary of `vocab`."""
        inverse = torch.full((vocab,), -1, dtype=torch.int64, device=ids.device)
        inverse[ids] = torch.arange(len(ids), device=ids.device)
        return Directions(rows, inverse)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.rows, self.inverse))

    def row_of(self, tokens: Tensor) -> Tensor:
        """Rows of token ids; -1 where there is none, as for negative ids."""
        return torch.where(tokens >= 0, self.inverse[tokens.clamp_min(0)], -1)

    def known(self, tokens: Tensor) -> float:
        """Share of some tokens [n] that have a direction."""
        return float((self.row_of(tokens) >= 0).float().mean())

    def combine(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """sum_c weights[n, c] D_tokens[n, c], [n, H] float32. Tokens without a direction add nothing."""
        at = self.row_of(tokens)
        kept = torch.where(at >= 0, weights.float(), 0.0)
        # A gather of all rows first would take most of a step's learning.
        return F.embedding_bag(at.clamp_min(0), self.rows, per_sample_weights=kept, mode="sum")
