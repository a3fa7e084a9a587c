"""Votes of places that look alike, against the formula by loops over everything that was ever learned."""

from __future__ import annotations

import math

import pytest
import torch

from specroll_core.soft_correction import SoftCorrection, SoftOptions
from specroll_core.whitening import Directions
from tests.core.test_bias_correction import H, K, V, matured

X = 6


def expected(known: list, x, z, o: SoftOptions, rows):
    """known: (key, temperature, tokens, p) of one slot and head, oldest first."""
    alike = sorted(known[-o.places :], key=lambda place: float(place[0] @ x), reverse=True)[: o.voters]
    votes = [math.exp(o.sharpness * (float(key @ x) - o.alike)) for key, *_ in alike]
    move = torch.zeros(H)
    for vote, (_, temperature, tokens, p) in zip(votes, alike, strict=True):
        likely = sorted(((q, t) for t, q in zip(tokens, p, strict=True) if t >= 0), reverse=True)[: o.tokens]
        for q, token in likely:
            move += o.strength * vote / (1 + sum(votes)) * temperature * q * rows[token]
    most = o.bound * z.norm()
    return z + move * min(1.0, float(most / move.norm().clamp_min(1e-12)))


@pytest.mark.parametrize("bound", [0.2, 100.0])
def test_votes_are_the_formula(bound: float) -> None:
    g = torch.Generator().manual_seed(0)
    directions = Directions.of(torch.randn(V, H, generator=g), torch.arange(V), V)
    projection = torch.randn(H, X, generator=g)
    options = SoftOptions(sharpness=5.0, alike=0.3, places=7, voters=3, tokens=2, bound=bound)
    soft = SoftCorrection(3, K, directions, lambda h, e: (h + 2 * e) @ projection, X, options)
    known: dict[tuple[int, int], list] = {(slot, head): [] for slot in range(3) for head in range(K)}
    z, h, e = (torch.randn(*shape, generator=g) for shape in ((2, K, H), (2, H), (2, H)))
    assert torch.equal(soft.correct(torch.tensor([0, 1]), z, h, e)[0], z)  # nothing is known
    for _ in range(6):
        some = matured(12, g)
        keys = torch.nn.functional.normalize(torch.randn(12, X, generator=g), dim=-1)
        object.__setattr__(some, "memo", keys)
        slots = torch.randint(2, (12,), generator=g)
        soft.learn(slots, some)
        for i in range(12):
            place = keys[i], float(some.temperature[i]), some.target[i].tolist(), some.p[i].tolist()
            known[int(slots[i]), int(some.heads[i])].append(place)
        u, memo = soft.correct(torch.tensor([1, 0]), z, h, e)
        torch.testing.assert_close(memo.norm(dim=-1), torch.ones(2))
        for row, slot in enumerate((1, 0)):
            for k in range(K):
                there = expected(known[slot, k], memo[row], z[row, k], options, directions.rows)
                torch.testing.assert_close(u[row, k], there, rtol=1e-4, atol=1e-5)
    assert max(map(len, known.values())) > options.places  # the ring has gone round
    assert torch.equal(soft.correct(torch.tensor([2]), z[:1], h[:1], e[:1])[0], z[:1])
    soft.reset(1)
    u = soft.correct(torch.tensor([0, 1]), z, h, e)[0]
    assert not torch.equal(u[0], z[0])
    assert torch.equal(u[1], z[1])
    soft.halve()
    assert torch.equal(soft.correct(torch.tensor([0, 1]), z, h, e)[0], z)
    assert soft.bytes == 3 * K * 7 * (4 * X + 12 * 2)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="strength"):
        SoftOptions(strength=0.0)
    with pytest.raises(ValueError, match="voters"):
        SoftOptions(voters=0)
