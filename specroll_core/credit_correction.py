"""The correction in the form of SpecRoll's authors: credit for what was left out of the tree, and trust before it acts.

As their public repositories have it; the paper (arXiv 2608.04962) may differ. A trajectory keeps a vector m_k [H] for
each head, from 0. When a proposal matures, with p and q renormalised on S, the 16 most likely tokens of either,

    g_d = sum_S (p - q) W_v
    g_c = sum_{omitted v} p(v) W_v - (sum_{omitted v} p(v)) sum_b beta_b W_b
    r   = g_d / 4 + g_c,      s = TV(p, q) / 2 + (1 - p of the candidates) / 2
    m_k <- rho_k m_k + (1 - rho_k) s r / RMS(r),  then divided by max(1, RMS(m_k)),

unless s < 0.02. Candidates are the tree's tokens at the head's depth; omitted are likely tokens of p that are none; b
runs over the two candidates of lowest rank, beta is the softmax of their logits, that is, in proportion to q.

Trust: a is the cosine between sketches, random projections to 24 numbers, of m_k when it was proposed and of r. With
the mean of a less one standard error as `lower`, confidence is `sqrt(clip(lower / 0.1) clip(RMS(m_k) / 0.03))`, and 0
until s adds up to 2, 4, 4 and 8, 32, 64 cosines are there, by head. Injected is

    u_k = z_k + (low_k + (high_k - low_k) confidence) RMS(z_k) m_k / RMS(m_k),

nothing where confidence is 0, or where it would lower the logit of the most likely omitted token of the last update
against that of the last candidate.

What differs here: a token that only one law has among its 16 counts with that law alone, the token that was sampled
counts where p has it among these, and in place of a probe of its own the part's gate (`gate.py`) switches it off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll_core.pending import Matured

# By head, the last one for all further ones.
_KEEP = (0.85, 0.90, 0.95)
_LOW, _HIGH = (0.01, 0.005, 0.005), (0.03, 0.015, 0.01)
_LEAST_SEVERITY, _LEAST_COUNT = (2.0, 4.0, 4.0), (8.0, 32.0, 64.0)
_DIRECT = 0.25
_IGNORED = 0.02
_TRUSTED, _FULL = 0.10, 0.03
_SKETCH = 24
_TINY = 1e-12


@dataclass(slots=True)
class _Trust:
    """Of one slot and head: summed severity, and count, mean and squared deviations of the cosines (Welford)."""

    severity: float = 0.0
    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def see(self, cosine: float) -> None:
        self.count += 1
        off = cosine - self.mean
        self.mean += off / self.count
        self.squares += off * (cosine - self.mean)

    def halve(self) -> None:
        self.severity, self.count, self.squares = self.severity / 2, self.count / 2, self.squares / 2

    def confidence(self, head: int, rms: float, patience: float) -> float:
        least = max(2.0, patience * _of(_LEAST_COUNT, head))
        if self.severity < patience * _of(_LEAST_SEVERITY, head) or self.count < least:
            return 0.0
        lower = self.mean - math.sqrt(self.squares / (self.count - 1) / self.count)
        return math.sqrt(min(1.0, max(0.0, lower / _TRUSTED)) * min(1.0, rms / _FULL))


class CreditCorrection:
    """A `Corrector`. vectors: [slots, K, H] float32, m; margins: [slots, K, H], the row of the omitted token less that
    of the last candidate. Allocated once."""

    wants_candidates = True

    def __init__(
        self, slots: int, heads: int, hidden: int, rows: Callable[[Tensor], Tensor], *, patience: float = 1.0
    ) -> None:
        """rows: the LM head's rows [..., H] of token ids [...] int64, as they are now. patience: share of the evidence
        above that confidence waits for."""
        self._patience = patience
        self._rows = rows
        device = rows(torch.zeros(1, dtype=torch.int64)).device
        self.memo = heads * _SKETCH
        self.vectors = torch.zeros(slots, heads, hidden, device=device)
        self.margins = torch.zeros(slots, heads, hidden, device=device)
        self._trust = [[_Trust() for _ in range(heads)] for _ in range(slots)]
        self._ratio = torch.zeros(slots, heads, device=device)
        generator = torch.Generator().manual_seed(0)
        self.projection = torch.randn(hidden, _SKETCH, generator=generator).to(device)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.vectors, self.margins, self._ratio))

    def reset(self, slot: int) -> None:
        for state in (self.vectors, self.margins, self._ratio):
            state[slot] = 0
        self._trust[slot] = [_Trust() for _ in self._trust[slot]]

    def halve(self) -> None:
        self.vectors *= 0.5
        for slot, trusts in enumerate(self._trust):
            for head, trust in enumerate(trusts):
                trust.halve()
                self._set_ratio(slot, head)

    def correct(self, slots: Tensor, z: Tensor, h: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        m = self.vectors[slots]
        allowed = (m * self.margins[slots]).sum(-1) >= 0
        ratio = torch.where(allowed, self._ratio[slots], 0.0)[..., None]
        moved = ratio * _rms(z.float()) * m / _rms(m).clamp_min(_TINY)
        return z + moved.to(z.dtype), (m @ self.projection).flatten(1)

    def learn(self, slots: Tensor, matured: Matured) -> None:
        r, severity, margins, has_margin = self._updates(matured)
        sizes = _rms(r)
        sketches = matured.memo.view(len(matured), -1, _SKETCH)
        mine = sketches[torch.arange(len(matured), device=r.device), matured.heads]
        cosines = F.cosine_similarity(mine, r @ self.projection, dim=-1)
        listed = zip(
            slots.tolist(),
            matured.heads.tolist(),
            severity.tolist(),
            sizes.flatten().tolist(),
            mine.any(-1).tolist(),
            cosines.tolist(),
            has_margin.tolist(),
            strict=True,
        )
        for i, (slot, head, s, size, had_vector, cosine, omitted) in enumerate(listed):
            if s < _IGNORED or size < _TINY:
                continue
            trust, keep, m = self._trust[slot][head], _of(_KEEP, head), self.vectors[slot, head]
            trust.severity += s
            if had_vector:
                trust.see(cosine)
            m.mul_(keep).add_(r[i], alpha=(1 - keep) * s / size)
            m.div_(_rms(m).clamp_min(1.0))
            if omitted:
                self.margins[slot, head] = margins[i]
            self._set_ratio(slot, head)

    def _set_ratio(self, slot: int, head: int) -> None:
        confidence = self._trust[slot][head].confidence(head, float(_rms(self.vectors[slot, head])), self._patience)
        low, high = _of(_LOW, head), _of(_HIGH, head)
        self._ratio[slot, head] = low + (high - low) * confidence if confidence > 0 else 0.0

    def _updates(self, matured: Matured) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """r [n, H], s [n], the margins' new rows [n, H] and whether there are any [n] bool."""
        proposed, target = matured.proposed, matured.target
        q = _normalised(torch.where(proposed >= 0, matured.q, 0.0))
        p = _normalised(torch.where(target >= 0, matured.p, 0.0))
        met = (proposed[:, :, None] == target[:, None, :]) & (proposed >= 0)[:, :, None]
        p_proposed = (met * p[:, None, :]).sum(-1)
        distance = ((p_proposed - q).abs().sum(-1) + torch.where(met.any(1), 0.0, p).sum(-1)) / 2
        candidate = (target[:, :, None] == matured.candidates[:, None, :]).any(-1) & (target >= 0)
        ranked = (proposed[:, :, None] == matured.candidates[:, None, :]).any(-1) & (proposed >= 0)
        omitted = torch.where(candidate, 0.0, p)
        # The two candidates of lowest rank: those of the head's list with the smallest q.
        lowest = torch.where(ranked, -q, -math.inf).topk(min(2, q.shape[1]), dim=-1)
        known = lowest.values > -math.inf
        beta = torch.where(known, (-lowest.values).clamp_min(_TINY), 0.0)
        boundary = known.any(-1)
        of_p, of_q = self._rows(target.clamp_min(0)).float(), self._rows(proposed.clamp_min(0)).float()
        at_edge = of_q.gather(1, lowest.indices[..., None].expand(-1, -1, of_q.shape[-1]))
        edge = torch.einsum("nc,nch->nh", _normalised(beta), at_edge)
        direct = torch.einsum("nc,nch->nh", p, of_p) - torch.einsum("nc,nch->nh", q, of_q)
        credit = torch.einsum("nc,nch->nh", omitted, of_p) - omitted.sum(-1, keepdim=True) * edge
        r = _DIRECT * direct + torch.where(boundary[:, None], credit, 0.0)
        severity = (distance + 1 - (p - omitted).sum(-1)) / 2
        most = omitted.max(-1)
        first = of_p.gather(1, most.indices[:, None, None].expand(-1, 1, of_p.shape[-1])).squeeze(1)
        return r, severity, first - at_edge[:, 0], boundary & (most.values > 0)


def _of(by_head: tuple[float, ...], head: int) -> float:
    return by_head[min(head, len(by_head) - 1)]


def _rms(x: Tensor) -> Tensor:
    """[..., 1] root mean square of the last dimension."""
    return x.square().mean(-1, keepdim=True).sqrt()


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp_min(_TINY)
