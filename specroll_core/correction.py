"""Hidden-state correction: fast weights that move the heads' states by what verification has shown.

    u_k = z_k + bound(F_k x, 0.2 |z_k|)

x is a unit vector of features of the round's start, F_k [H, X] starts at 0 with every trajectory, and bound(v, r)
scales v down to norm r. When a proposed position matures, with the target's law p and the proposed law q,

    F_k += 3 T sum_v (p(v) - q(v)) D_v x'     over the 16 most likely tokens of q and of p.

D_v are *whitened* rows of the LM head W over the proposal vocabulary. With m the mean row and C the rows' covariance
under token frequencies f,

    P = (C + 0.1 tr(C) / H I)^-1,    D_v = P (W_v - m) / ((W_v - m)' P (W_v - m)):

one unit along D_v adds one to logit v and little elsewhere. Along plain rows, which share large common directions, the
same corrections gain nothing. No backpropagation, and no state but F.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of a law that a correction looks at.
TOP = 16
# Start of a round that was never proposed.
_NEVER = -(1 << 40)


@dataclass(frozen=True, slots=True)
class CorrectionOptions:
    """rate: the step, before the temperature. bound: largest correction, as a share of the state's norm. whitening:
    weight of the identity in the covariance. components: features of the hidden state, and as many of the embedding.
    """

    rate: float = 3.0
    bound: float = 0.2
    whitening: float = 0.1
    components: int = 32

    def __post_init__(self) -> None:
        if min(self.rate, self.bound, self.whitening) <= 0 or self.components < 1:
            raise ValueError("rate, bound, whitening and components must be positive.")


@torch.no_grad()
def whitened_rows(rows: Tensor, frequency: Tensor, whitening: float = 0.1) -> Tensor:
    """D [M, H] float32. rows: [M, H], the LM head's rows of the proposal vocabulary; frequency: [M], how often each
    token occurs in recent rollouts, in any unit. Once per LM head, off the serving path: M H^2 products."""
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


class Features:
    """x = unit [principal components of h; random projections of e], in one product.

    Both halves get the same mean norm: neither h nor e, whose scales are the model's, drowns the other.
    """

    def __init__(self, hidden: Tensor, embedded: Tensor, components: int = 32, seed: int = 0) -> None:
        """hidden: [P, H], states of recent rollouts, at least as many as there are components; embedded: [P, H], the
        embeddings of the tokens drawn from them."""
        hidden, embedded = hidden.float(), embedded.float()
        if hidden.shape[0] < components:
            raise ValueError(f"hidden must hold at least {components} states, one for each component.")
        self._mean = hidden.mean(0)
        centred = hidden - self._mean
        covariance = centred.T @ centred / len(centred)
        self._basis = torch.linalg.eigh(covariance).eigenvectors[:, -components:]
        generator = torch.Generator().manual_seed(seed)
        projection = torch.randn(embedded.shape[1], components, generator=generator) / math.sqrt(components)
        self._projection = projection.to(embedded.device)
        self._basis = self._basis / (centred @ self._basis).norm(dim=-1).mean()
        self._projection = self._projection / (embedded @ self._projection).norm(dim=-1).mean()

    @property
    def size(self) -> int:
        return int(self._basis.shape[1] + self._projection.shape[1])

    def __call__(self, h: Tensor, e: Tensor) -> Tensor:
        """h, e: [B, H]. Returns [B, X] float32 of norm 1."""
        parts = [(h.float() - self._mean) @ self._basis, e.float() @ self._projection]
        return F.normalize(torch.cat(parts, dim=-1), dim=-1)


def top_tokens(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The `TOP` most likely columns [B, ..., C] and their probabilities, of logits [B, ..., M] at temperatures [B]."""
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0).view(-1, *[1] * (logits.dim() - 1))
    top = scaled.topk(min(TOP, logits.shape[-1]), dim=-1)
    return top.indices, (top.values - scaled.logsumexp(-1, keepdim=True)).exp()


class FastWeights:
    """F of `slots` trajectories, or of as many groups whose siblings share one.

    weights: [slots, K, H, X] float32, 0.44 MB per slot for three heads, H = 576 and X = 64, allocated once.
    """

    def __init__(
        self, slots: int, heads: int, directions: Tensor, features: int, options: CorrectionOptions | None = None
    ) -> None:
        """directions: [M, H], what `whitened_rows` returned."""
        self.options = options or CorrectionOptions()
        self.directions = directions
        device, H = directions.device, directions.shape[1]
        self.weights = torch.zeros(slots, heads, H, features, device=device)

    @property
    def bytes(self) -> int:
        return self.weights.numel() * self.weights.element_size()

    def reset(self, slot: int) -> None:
        """A new trajectory, or none, in this slot."""
        self.weights[slot] = 0

    def correct(self, slots: Tensor, z: Tensor, x: Tensor) -> Tensor:
        """u [B, K, H] in z's type. slots: [B] int64; z: [B, K, H]; x: [B, X]."""
        move = torch.einsum("bkhx,bx->bkh", self.weights[slots], x)
        norm = move.norm(dim=-1, keepdim=True)
        most = self.options.bound * z.float().norm(dim=-1, keepdim=True)
        move = move * torch.clamp(most / norm.clamp_min(1e-12), max=1.0)
        return z + move.to(z.dtype)

    def learn(
        self,
        slots: Tensor,
        heads: Tensor,
        x: Tensor,
        temperature: Tensor,
        columns: Tensor,
        difference: Tensor,
    ) -> None:
        """Matured proposals, n at a time; several may be of one slot and head.

        slots, heads: [n] int64, heads from 0; x: [n, X], of the time of proposal; temperature: [n]; columns: [n, C]
        int64 of the proposal vocabulary, -1 for none; difference: [n, C], p - q of each.
        """
        weight = torch.where(columns >= 0, difference.float(), 0.0) * (self.options.rate * temperature)[:, None]
        step = torch.einsum("nc,nch->nh", weight, self.directions[columns.clamp_min(0)])
        self.weights.index_put_((slots, heads), step[:, :, None] * x[:, None, :], accumulate=True)


@dataclass(frozen=True, slots=True)
class Matured:
    """n proposals whose position has been verified: arguments of `FastWeights.learn`. row: which of the verified
    positions each one met."""

    row: Tensor
    heads: Tensor
    x: Tensor
    temperature: Tensor
    columns: Tensor
    difference: Tensor


class PendingProposals:
    """What was proposed for positions that are not verified yet, per request slot.

    A round advances by a token at least, so after K rounds all K heads' proposals of a round have matured: a ring of K
    rounds holds everything. Allocated once.
    """

    def __init__(self, slots: int, heads: int, features: int, device: torch.device | str = "cpu") -> None:
        self.start = torch.full((slots, heads), _NEVER, dtype=torch.int64, device=device)
        self.x = torch.zeros(slots, heads, features, device=device)
        self.temperature = torch.zeros(slots, heads, device=device)
        self.columns = torch.full((slots, heads, heads, TOP), -1, dtype=torch.int64, device=device)
        self.q = torch.zeros(slots, heads, heads, TOP, device=device)
        self._next = torch.zeros(slots, dtype=torch.int64, device=device)

    @property
    def bytes(self) -> int:
        tensors = (self.start, self.x, self.temperature, self.columns, self.q, self._next)
        return sum(t.numel() * t.element_size() for t in tensors)

    def reset(self, slot: int) -> None:
        """A new trajectory, or none, in this slot."""
        self.start[slot] = _NEVER

    def push(self, slots: Tensor, start: Tensor, x: Tensor, temperature: Tensor, columns: Tensor, q: Tensor) -> None:
        """A round of B slots. start: [B] int64, the pending tokens' positions; x: [B, X]; temperature: [B]; columns,
        q: [B, K, C], the heads' most likely columns and their probabilities, C at most `TOP`."""
        place = self._next[slots]
        self.start[slots, place] = start
        self.x[slots, place] = x
        self.temperature[slots, place] = temperature
        self.columns[slots, place] = F.pad(columns, (0, TOP - columns.shape[-1]), value=-1)
        self.q[slots, place] = F.pad(q.float(), (0, TOP - q.shape[-1]))
        self._next[slots] = (place + 1) % self.start.shape[1]

    def mature(self, slots: Tensor, positions: Tensor, columns: Tensor, p: Tensor) -> Matured:
        """Proposals for verified positions: slots, positions: [n]; columns: [n, C], the target's most likely tokens
        there as columns, -1 outside the proposal vocabulary; p: [n, C] their probabilities.

        A token that only one law has among its most likely ones counts with that law alone.
        """
        ahead = positions[:, None] - self.start[slots]  # [n, R]
        row, place = ((ahead >= 1) & (ahead <= self.start.shape[1])).nonzero(as_tuple=True)
        slot, head = slots[row], ahead[row, place] - 1
        return Matured(
            row=row,
            heads=head,
            x=self.x[slot, place],
            temperature=self.temperature[slot, place],
            columns=torch.cat([self.columns[slot, place, head], columns[row]], dim=-1),
            difference=torch.cat([-self.q[slot, place, head], p[row].float()], dim=-1),
        )
