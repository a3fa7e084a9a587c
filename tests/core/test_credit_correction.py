"""The authors' form against its formula, one proposal and token at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specroll_core.credit_correction import CreditCorrection
from specroll_core.pending import TOP, Matured

H, V, K, C = 16, 40, 3, 6
KEEP, LOW, HIGH = (0.85, 0.90, 0.95), (0.01, 0.005, 0.005), (0.03, 0.015, 0.01)


def rms(x: Tensor) -> float:
    return math.sqrt(sum(float(v) ** 2 for v in x) / len(x))


@dataclass
class Naive:
    """One slot and head."""

    head: int
    lm_head: Tensor
    projection: Tensor
    m: Tensor = field(default_factory=lambda: torch.zeros(H))
    severities: list[float] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    margin: Tensor = field(default_factory=lambda: torch.zeros(H))

    def learn(self, p: dict[int, float], q: dict[int, float], candidates: set[int], sketch: Tensor) -> None:
        p, q = ({v: x / max(1e-12, sum(law.values())) for v, x in law.items()} for law in (p, q))
        everything = set(p) | set(q)
        direct, credit = torch.zeros(H), torch.zeros(H)
        for v in everything:
            direct += (p.get(v, 0.0) - q.get(v, 0.0)) * self.lm_head[v]
        variation = sum(abs(p.get(v, 0.0) - q.get(v, 0.0)) for v in everything) / 2
        omitted = {v: x for v, x in p.items() if v not in candidates}
        boundary = sorted((x, v) for v, x in q.items() if v in candidates)[:2]
        if boundary:
            weights = sum(x for x, _ in boundary)
            edge = sum(x / weights * self.lm_head[v] for x, v in boundary)
            for v, x in omitted.items():
                credit += x * (self.lm_head[v] - edge)
        r = 0.25 * direct + credit
        severity = 0.5 * variation + 0.5 * (1 - sum(x for v, x in p.items() if v in candidates))
        if severity < 0.02 or rms(r) < 1e-12:
            return
        self.severities.append(severity)
        if bool(sketch.any()):
            mine = r @ self.projection
            self.cosines.append(float(sketch @ mine / (sketch.norm() * mine.norm())))
        keep = KEEP[self.head]
        self.m = keep * self.m + (1 - keep) * severity * r / rms(r)
        self.m = self.m / max(1.0, rms(self.m))
        if boundary and omitted:
            best = max(omitted, key=lambda v: omitted[v])
            self.margin = self.lm_head[best] - self.lm_head[boundary[0][1]]

    def ratio(self) -> float:
        n = len(self.cosines)
        if sum(self.severities) < (2.0, 4.0, 4.0)[self.head] or n < (8, 32, 64)[self.head]:
            return 0.0
        mean = sum(self.cosines) / n
        deviation = math.sqrt(sum((a - mean) ** 2 for a in self.cosines) / (n - 1))
        lower = mean - deviation / math.sqrt(n)
        confidence = math.sqrt(min(1.0, max(0.0, lower / 0.1)) * min(1.0, rms(self.m) / 0.03))
        if confidence == 0 or float(self.m @ self.margin) < 0:
            return 0.0
        return LOW[self.head] + (HIGH[self.head] - LOW[self.head]) * confidence

    def correct(self, z: Tensor) -> Tensor:
        return z + self.ratio() * rms(z) * self.m / max(1e-12, rms(self.m))


def test_learning_and_injection_are_the_formula() -> None:
    """Laws that lean the same way at all positions, so that trust grows; three slots, one of which never learns."""
    g = torch.Generator().manual_seed(0)
    lm_head = torch.randn(V, H, generator=g)
    credit = CreditCorrection(3, K, H, lambda tokens: lm_head[tokens])
    naive = {(s, k): Naive(k, lm_head, credit.projection) for s in (0, 2) for k in range(K)}
    leaning = torch.randn(V, generator=g) * 2
    acted = refused = 0
    for _ in range(60):
        n = 12
        slots = torch.tensor([0, 2])[torch.randint(2, (n,), generator=g)]
        heads = torch.randint(K, (n,), generator=g)
        z = torch.randn(3, K, H, generator=g)
        u, memo = credit.correct(torch.arange(3), z, z[:, 0], z[:, 0])
        for s, k in naive:
            torch.testing.assert_close(u[s, k], naive[s, k].correct(z[s, k]), rtol=1e-4, atol=1e-5)
            acted += not torch.equal(u[s, k], z[s, k])
            refused += float(naive[s, k].m @ naive[s, k].margin) < 0
        assert torch.equal(u[1], z[1])
        p = (leaning + torch.randn(n, V, generator=g)).softmax(-1).topk(C)
        q = torch.randn(n, V, generator=g).softmax(-1).topk(C)
        target = torch.where(torch.rand(n, C, generator=g) < 0.15, -1, p.indices)
        candidates = torch.full((n, TOP), -1)
        candidates[:, :3] = q.indices[:, :3]
        candidates[0] = -1  # a tree that does not reach the head's depth
        candidates[1, :2] = torch.randint(V, (2,), generator=g)
        batch = Matured(
            row=torch.arange(n),
            heads=heads,
            memo=memo[slots],
            temperature=torch.ones(n),
            proposed=q.indices,
            q=q.values,
            target=target,
            p=p.values,
            candidates=candidates,
        )
        credit.learn(slots, batch)
        for i in range(n):
            s, k = int(slots[i]), int(heads[i])
            naive[s, k].learn(
                {v: x for v, x in zip(target[i].tolist(), p.values[i].tolist(), strict=True) if v >= 0},
                dict(zip(q.indices[i].tolist(), q.values[i].tolist(), strict=True)),
                {v for v in candidates[i].tolist() if v >= 0},
                memo[s].view(K, -1)[k],
            )
    for (s, k), one in naive.items():
        torch.testing.assert_close(credit.vectors[s, k], one.m, rtol=1e-3, atol=1e-4)
    assert acted > 50
    assert refused > 0


def test_state_is_dropped_and_halved() -> None:
    lm_head = torch.randn(V, H, generator=torch.Generator().manual_seed(1))
    credit = CreditCorrection(2, K, H, lambda tokens: lm_head[tokens])
    credit.vectors[:] = 1.0
    credit.halve()
    assert credit.vectors.unique().tolist() == [0.5]
    credit.reset(0)
    assert credit.vectors[0].abs().max() == 0
    assert credit.vectors[1].min() == 0.5
    assert credit.bytes == (2 * K * H * 2 + 2 * K) * 4
