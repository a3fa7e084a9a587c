"""Uniforms from counters: what a request draws depends on its seed and round, never on its batch.

SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014) applied to a hash of (seed, round, stream) plus an
index. It runs on any device without state, so a request that was retracted, moved or batched anew goes on as it
would have.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, odd, as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_WORD = 2**64 - 1
# So many numbers take as long either way, about 0.1 ms.
_FEW = 128


class Stream(IntEnum):
    """Independent uses of one request's randomness."""

    TREE = 1  # tokens of sampled children
    VERIFY = 2  # coins and draws of the walk


def uniforms(seeds: Tensor, rounds: Tensor, stream: Stream, count: int) -> Tensor:
    """[B, count] float64 in [0, 1), multiples of 2^-53.

    seeds: [B] int64, any values; rounds: [B] int64, the request's own count of rounds.
    """
    return uniforms_at(seeds, rounds[:, None], (stream,), (count,))[0]


def uniforms_at(seeds: Tensor, rounds: Tensor, streams: Sequence[Stream], counts: Sequence[int]) -> tuple[Tensor, ...]:
    """`uniforms` of R rounds and streams of each seed in one pass: R tensors [B, counts[r]].

    rounds: [B, R] int64; streams, counts: R each. A few numbers are computed in Python, which takes less than the forty
    operations on tensors.
    """
    if seeds.device.type == "cpu" and len(seeds) * sum(counts) <= _FEW:
        return _few_uniforms(seeds.tolist(), rounds.tolist(), streams, counts)
    offsets, columns, steps = _layout(tuple(map(int, streams)), tuple(counts), seeds.device)
    key = _mix(_mix(_mix(seeds)[:, None] + rounds) + offsets)
    bits = _mix(key[:, columns] + steps)
    numbers = _shift(bits, 11).to(torch.float64) * 2.0**-53
    return torch.split(numbers, list(counts), dim=1)


def _few_uniforms(
    seeds: Sequence[int], rounds: Sequence[Sequence[int]], streams: Sequence[Stream], counts: Sequence[int]
) -> tuple[Tensor, ...]:
    """The same numbers in Python's integers, modulo 2^64."""
    found: list[list[float]] = []
    for seed, its_rounds in zip(seeds, rounds, strict=True):
        mixed, row = _mix_integer(seed), []
        for number, stream, count in zip(its_rounds, streams, counts, strict=True):
            key = _mix_integer(_mix_integer(mixed + number) + stream)
            row += [(_mix_integer(key + i * _GOLDEN) >> 11) * 2.0**-53 for i in range(1, count + 1)]
        found.append(row)
    return torch.split(torch.tensor(found, dtype=torch.float64), list(counts), dim=1)


def _mix_integer(z: int) -> int:
    z = (z + _GOLDEN) & _WORD
    z = ((z ^ (z >> 30)) * _MIX_1) & _WORD
    z = ((z ^ (z >> 27)) * _MIX_2) & _WORD
    return z ^ (z >> 31)


@functools.lru_cache(maxsize=256)
def _layout(streams: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """[R] the streams; [sum of counts] which of them each number belongs to, and its step on that counter."""
    columns = [r for r, count in enumerate(counts) for _ in range(count)]
    index = [i + 1 for count in counts for i in range(count)]
    integers = (torch.tensor(x, dtype=torch.int64, device=device) for x in (streams, columns, index))
    offsets, which, steps = integers
    return offsets, which, steps * _GOLDEN


def _mix(z: Tensor) -> Tensor:
    z = z + _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
