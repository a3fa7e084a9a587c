"""Rotary embeddings against complex multiplication in float64, and what is left to SGLang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from services.rollout.sglang_plugin.rotary import rotate

PLACES, DIM = 40, 8


def make_layer(**changed):
    angles = torch.arange(PLACES)[:, None] * 10_000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    fields = {"is_neox_style": True, "rotary_dim": DIM, "head_size": DIM}
    fields["cos_sin_cache"] = torch.cat((angles.cos(), angles.sin()), -1)
    return SimpleNamespace(**fields | changed), angles.double()


def turned(x, positions, angles):
    """Every pair (x[i], x[i + D / 2]) as a complex number, turned by its angle."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for t, position in enumerate(positions.tolist()):
        for start in range(0, x.shape[1], DIM):
            for i in range(DIM // 2):
                a, b = start + i, start + i + DIM // 2
                z = complex(x[t, a], x[t, b]) * complex(angles[position, i].cos(), angles[position, i].sin())
                out[t, a], out[t, b] = z.real, z.imag
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_pairs_turn_by_their_angles(dtype, tolerance):
    layer, angles = make_layer()
    for seed in range(2):  # the second time from the table of the first
        generator = torch.Generator().manual_seed(seed)
        positions = torch.randint(PLACES, (5,), generator=generator)
        joint = torch.randn(5, 5 * DIM, generator=generator).to(dtype)
        query, key = joint.split([3 * DIM, 2 * DIM], dim=-1)  # as SGLang gives them: views of one product
        got = rotate(None, layer, positions, query, key)
        for values, before in zip(got, (query, key), strict=True):
            assert values.dtype == dtype
            assert values.shape == before.shape
            expected = turned(before, positions, angles)
            torch.testing.assert_close(values.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("layer", "more"),
    [({"is_neox_style": False}, {}), ({"rotary_dim": 4}, {}), ({"sin_cos_cache": None}, {}), ({}, {"offsets": 3})],
)
def test_the_rest_is_left_to_sglang(layer, more):
    made, _ = make_layer(**layer)
    query, key = torch.zeros(1, DIM), torch.zeros(1, DIM)
    assert rotate(lambda *args, **kwargs: (args, kwargs), made, None, query, key, **more)[1] == more
