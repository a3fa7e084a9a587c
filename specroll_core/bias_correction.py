"""The correction without features: a moving average of what the proposals missed, added to the heads' states.

    u_k = z_k + bound(m_k, 0.2 |z_k|)
    m_k <- rho m_k + (1 - rho) r T sum_v (p(v) - q(v)) D_v     over the 16 most likely tokens of q and of p

m_k [H] starts at 0 with every trajectory; D_v are whitened rows of the LM head (`whitening.py`), so m_k is in effect a
bias on the logits of the tokens that were missed. It says the same at every place of the text, which is what the
features of `correction.py` are there to avoid: the ablation that shows what they are worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specroll_core.correction import bounded
from specroll_core.pending import Matured
from specroll_core.whitening import Directions


@dataclass(frozen=True, slots=True)
class BiasOptions:
    """keep: rho. rate: r. bound: largest correction, as a share of the state's norm."""

    keep: float = 0.95
    rate: float = 20.0
    bound: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.keep < 1:
            raise ValueError("keep must lie between 0 and 1.")
        if min(self.rate, self.bound) <= 0:
            raise ValueError("rate and bound must be positive.")


class BiasCorrection:
    """A `Corrector`. bias: [slots, K, H] float32, allocated once. directions may be replaced between two steps."""

    memo = 0
    wants_candidates = False

    def __init__(self, slots: int, heads: int, directions: Directions, options: BiasOptions | None = None) -> None:
        self.options = options or BiasOptions()
        self.directions = directions
        self.bias = torch.zeros(slots, heads, directions.rows.shape[1], device=directions.rows.device)

    @property
    def bytes(self) -> int:
        return self.bias.numel() * self.bias.element_size()

    def reset(self, slot: int) -> None:
        self.bias[slot] = 0

    def halve(self) -> None:
        self.bias *= 0.5

    def correct(self, slots: Tensor, z: Tensor, h: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return bounded(self.bias[slots], z, self.options.bound), torch.empty(len(z), 0, device=z.device)

    def learn(self, slots: Tensor, matured: Matured) -> None:
        keep = self.options.keep
        scale = ((1 - keep) * self.options.rate * matured.temperature)[:, None]
        steps = self.directions.combine(matured.tokens, scale * matured.difference)
        for i, (slot, head) in enumerate(zip(slots.tolist(), matured.heads.tolist(), strict=True)):
            self.bias[slot, head].mul_(keep).add_(steps[i])
