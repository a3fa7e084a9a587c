"""The correction by votes of earlier places that look alike: soft memory.

A place's key is x, the unit vector of the first head's inner layer there, which is what the heads make of state and
token. When a proposed position matures, head k remembers the key of the round's start with the target's likely tokens.
Places vote by the cosine of their key with that of the present round,

    w_j = exp(20 (x . x_j - 0.8)),    u_k = z_k + bound(g sum_j w_j / (1 + sum_j w_j) T_j sum_v p_j(v) D_v, 0.2 |z_k|),

along whitened rows D_v of the LM head (`whitening.py`), so that a vote moves its tokens' logits and little else. A
place less alike than a cosine of 0.8 counts little. What a trajectory remembers is a ring of its latest places.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll_core.correction import bounded
from specroll_core.pending import Matured
from specroll_core.whitening import Directions


@dataclass(frozen=True, slots=True)
class SoftOptions:
    """sharpness: 20, and alike: 0.8 of the formula. strength: g, in units of a logit at temperature 1. places: that a
    head remembers. voters: the most alike of them that are asked. tokens: that each votes for. bound: largest
    correction, as a share of the state's norm."""

    sharpness: float = 20.0
    alike: float = 0.8
    strength: float = 4.0
    places: int = 128
    voters: int = 8
    tokens: int = 4
    bound: float = 0.2

    def __post_init__(self) -> None:
        if min(self.sharpness, self.strength, self.bound) <= 0:
            raise ValueError("sharpness, strength and bound must be positive.")
        if min(self.places, self.voters, self.tokens) < 1:
            raise ValueError("places, voters and tokens must be at least 1.")


class SoftCorrection:
    """A `Corrector`, whose memo is x. directions may be replaced between two steps.

    keys: [slots, K, places, X] float32; tokens: [slots, K, places, tokens] int64, -1 for none; weights: the same shape,
    float32, T p. 0.4 MB per slot for three heads of rank 256. Allocated once.
    """

    wants_candidates = False

    def __init__(
        self,
        slots: int,
        heads: int,
        directions: Directions,
        key: Callable[[Tensor, Tensor], Tensor],
        size: int,
        options: SoftOptions | None = None,
    ) -> None:
        """key: from h and e [B, H] to [B, size], of any norm: `FutureTokenHeads.inner_of_first`."""
        self.options = options = options or SoftOptions()
        self.directions = directions
        self.memo = size
        self._key = key
        device, shape = directions.rows.device, (slots, heads, options.places)
        self.keys = torch.zeros(*shape, size, device=device)
        self.tokens = torch.full((*shape, options.tokens), -1, dtype=torch.int64, device=device)
        self.weights = torch.zeros(*shape, options.tokens, device=device)
        self._written = [[0] * heads for _ in range(slots)]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.keys, self.tokens, self.weights))

    def reset(self, slot: int) -> None:
        self.tokens[slot] = -1
        self.keys[slot] = 0
        self._written[slot] = [0] * self.keys.shape[1]

    def halve(self) -> None:
        """Forgets all: other heads make other keys."""
        for slot in range(len(self.keys)):
            self.reset(slot)

    def correct(self, slots: Tensor, z: Tensor, h: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        o = self.options
        x = F.normalize(self._key(h, e).float(), dim=-1)
        # A slot at a time: gathering all keys first would copy them.
        cosines = torch.stack([self.keys[slot] @ x[i] for i, slot in enumerate(slots.tolist())])  # [B, K, places]
        cosines = cosines.masked_fill(self.tokens[slots, ..., 0] < 0, -math.inf)
        most = cosines.topk(min(o.voters, o.places), dim=-1)
        votes = (o.sharpness * (most.values - o.alike)).exp()
        votes = votes / (1 + votes.sum(-1, keepdim=True))
        at = most.indices[..., None].expand(*most.indices.shape, o.tokens)
        tokens = self.tokens[slots].gather(2, at).flatten(2)  # [B, K, voters tokens]
        weights = (o.strength * votes[..., None] * self.weights[slots].gather(2, at)).flatten(2)
        move = self.directions.combine(tokens.flatten(0, 1), weights.flatten(0, 1)).view(z.shape)
        return bounded(move, z, o.bound), x

    def learn(self, slots: Tensor, matured: Matured) -> None:
        likely = matured.p.masked_fill(matured.target < 0, 0.0)
        top = likely.topk(min(self.options.tokens, likely.shape[1]), dim=-1)
        pad = (0, self.options.tokens - top.values.shape[1])
        tokens = F.pad(torch.where(top.values > 0, matured.target.gather(1, top.indices), -1), pad, value=-1)
        weights = F.pad(top.values * matured.temperature[:, None], pad)
        for i, (slot, head) in enumerate(zip(slots.tolist(), matured.heads.tolist(), strict=True)):
            place = self._written[slot][head] % self.options.places
            self._written[slot][head] += 1
            self.keys[slot, head, place] = matured.memo[i]
            self.tokens[slot, head, place] = tokens[i]
            self.weights[slot, head, place] = weights[i]
