"""Hidden-state correction: fast weights that move the heads' states by what verification has shown.

    u_k = z_k + bound(F_k x, 0.2 |z_k|)

x is a unit vector of features of the round's start, F_k [H, X] starts at 0 with every trajectory, and bound(v, r)
scales v down to norm r. When a proposed position matures, with the target's law p and the proposed law q,

    F_k += 3 T sum_v (p(v) - q(v)) D_v x'     over the 16 most likely tokens of q and of p,

along whitened rows D_v of the LM head (`whitening.py`). Along plain rows the same corrections gain nothing. No
backpropagation, and no state but F.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll_core.pending import Matured
from specroll_core.whitening import Directions


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


def bounded(move: Tensor, z: Tensor, share: float) -> Tensor:
    """z plus `move` [..., H], scaled down where it is longer than that share of z [..., H]; in z's type."""
    norm = move.norm(dim=-1, keepdim=True)
    most = share * z.float().norm(dim=-1, keepdim=True)
    return z + (move * torch.clamp(most / norm.clamp_min(1e-12), max=1.0)).to(z.dtype)


class FastWeights:
    """F of `slots` trajectories, or of as many groups whose siblings share one. A `Corrector`, whose memo is x.

    weights: [slots, K, H, X] float32, 0.44 MB per slot for three heads, H = 576 and X = 64, allocated once.
    directions may be replaced between two steps: F lies in the space of states, whatever it was learned along.
    """

    wants_candidates = False

    def __init__(
        self,
        slots: int,
        heads: int,
        directions: Directions,
        features: Features,
        options: CorrectionOptions | None = None,
    ) -> None:
        self.options = options or CorrectionOptions()
        self.directions = directions
        self.memo = features.size
        self._features = features
        device, H = directions.rows.device, directions.rows.shape[1]
        self.weights = torch.zeros(slots, heads, H, features.size, device=device)

    @property
    def bytes(self) -> int:
        return self.weights.numel() * self.weights.element_size()

    def reset(self, slot: int) -> None:
        self.weights[slot] = 0

    def halve(self) -> None:
        self.weights *= 0.5

    def correct(self, slots: Tensor, z: Tensor, h: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        x = self._features(h, e)
        if self.weights.device.type == "cpu":
            # Gathering the slots' weights first would take four times as long as the products.
            flat, (K, H) = self.weights.view(len(self.weights), -1, self.memo), z.shape[1:]
            move = torch.stack([flat[slot] @ x[i] for i, slot in enumerate(slots.tolist())]).view(-1, K, H)
        else:
            move = torch.einsum("bkhx,bx->bkh", self.weights[slots], x)
        return bounded(move, z, self.options.bound), x

    def learn(self, slots: Tensor, matured: Matured) -> None:
        scale = (self.options.rate * matured.temperature)[:, None]
        step = self.directions.combine(matured.tokens, scale * matured.difference)
        if self.weights.device.type == "cpu":
            for i, (slot, head) in enumerate(zip(slots.tolist(), matured.heads.tolist(), strict=True)):
                self.weights[slot, head].addr_(step[i], matured.memo[i])
        else:
            update = step[:, :, None] * matured.memo[:, None, :]
            self.weights.index_put_((slots, matured.heads), update, accumulate=True)
