"""The moving average against its formula, one proposal at a time."""

from __future__ import annotations

import pytest
import torch

from specroll_core.bias_correction import BiasCorrection, BiasOptions
from specroll_core.pending import Matured
from specroll_core.whitening import Directions

H, V, K, C = 8, 30, 3, 5


def matured(n: int, g: torch.Generator) -> Matured:
    def tokens() -> torch.Tensor:
        drawn = torch.stack([torch.randperm(V, generator=g)[:C] for _ in range(n)])
        return torch.where(torch.rand(n, C, generator=g) < 0.2, -1, drawn)

    return Matured(
        row=torch.arange(n),
        heads=torch.randint(K, (n,), generator=g),
        memo=torch.empty(n, 0),
        temperature=0.5 + torch.rand(n, generator=g),
        proposed=tokens(),
        q=torch.rand(n, C, generator=g) / C,
        target=tokens(),
        p=torch.rand(n, C, generator=g) / C,
        candidates=torch.empty(n, 0, dtype=torch.int64),
    )


def test_learning_is_the_formula_in_the_order_of_positions() -> None:
    g = torch.Generator().manual_seed(0)
    directions = Directions.of(torch.randn(V, H, generator=g), torch.arange(V), V)
    options = BiasOptions(keep=0.7, rate=4.0)
    bias, expected = BiasCorrection(3, K, directions, options), torch.zeros(3, K, H)
    for _ in range(4):
        some = matured(20, g)
        slots = torch.randint(2, (20,), generator=g)
        bias.learn(slots, some)
        for i in range(20):
            missed = torch.zeros(H)
            for token, q in zip(some.proposed[i].tolist(), some.q[i].tolist(), strict=True):
                if token >= 0:
                    missed -= q * directions.rows[token]
            for token, p in zip(some.target[i].tolist(), some.p[i].tolist(), strict=True):
                if token >= 0:
                    missed += p * directions.rows[token]
            m = expected[slots[i], some.heads[i]]
            m.copy_(0.7 * m + 0.3 * 4.0 * some.temperature[i] * missed)
    torch.testing.assert_close(bias.bias, expected, rtol=1e-4, atol=1e-5)
    z = torch.randn(1, K, H, generator=g)
    u, memo = bias.correct(torch.tensor([1]), z, z[:, 0], z[:, 0])
    for k in range(K):
        most = 0.2 * z[0, k].norm()
        move = expected[1, k] * min(1.0, float(most / expected[1, k].norm()))
        torch.testing.assert_close(u[0, k], z[0, k] + move, rtol=1e-4, atol=1e-5)
    assert memo.shape == (1, 0)
    assert torch.equal(bias.correct(torch.tensor([2]), z, z[:, 0], z[:, 0])[0], z)
    bias.halve()
    torch.testing.assert_close(bias.bias, expected / 2, rtol=1e-4, atol=1e-5)
    bias.reset(1)
    assert bias.bias[1].abs().max() == 0
    assert bias.bytes == 3 * K * H * 4


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="keep"):
        BiasOptions(keep=1.0)
    with pytest.raises(ValueError, match="rate"):
        BiasOptions(rate=0.0)
