"""Uniform numbers as a function of (seed, position): no generator state, no order of draws.

A request with a seed samples the same tokens whatever else is in its batch, however it is retracted, batched
or speculated on. The generator is SplitMix64 (Steele, Lea and Flood 2014), its state started from the mixed seed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)
_STREAM = _signed(0xD1B54A32D192ED03)


def uniforms(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """One number per row in [0, 1), float64 with 53 random bits.

    seeds, positions: int64, of shapes that broadcast. Streams are independent of each other: position p of
    stream 0 decides the token at p, other streams serve other draws that belong to the same position.
    """
    key = _mix(seeds.long() + _signed(stream * _STREAM & (1 << 64) - 1))
    bits = _shift(_mix(key + (positions.long() + 1) * _GAMMA), 11)
    return bits.to(torch.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift(x, 27)) * _MULTIPLY_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift; torch's own copies the sign bit."""
    return (x >> by) & ((1 << (64 - by)) - 1)
