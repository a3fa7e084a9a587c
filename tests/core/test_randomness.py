from __future__ import annotations

import pytest
import torch

from specroll_core import randomness
from specroll_core.randomness import Stream, _mix, uniforms, uniforms_at


def splitmix64(z: int) -> int:
    mask = 2**64 - 1
    z = (z + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_the_mixing_is_splitmix64() -> None:
    values = [0, 1, -1, 2**62, -(2**63), 1234567]
    got = _mix(torch.tensor(values)).tolist()
    assert [g % 2**64 for g in got] == [splitmix64(v % 2**64) for v in values]


def test_few_numbers_are_the_same_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = torch.tensor([0, -1, 2**62, -(2**63), 77])
    rounds = torch.tensor([[0, 5, 2**40], [1, 2, 3], [9, 9, 9], [0, 0, 0], [123, 4, -1]])
    asked = (seeds, rounds, (Stream.TREE, Stream.VERIFY, Stream.VERIFY), (7, 2, 1))
    few = uniforms_at(*asked)
    monkeypatch.setattr(randomness, "_FEW", 0)
    many = uniforms_at(*asked)
    assert [x.shape for x in few] == [(5, 7), (5, 2), (5, 1)]
    assert all(torch.equal(a, b) and a.dtype == b.dtype == torch.float64 for a, b in zip(few, many, strict=True))


def test_rows_do_not_depend_on_their_batch() -> None:
    seeds, rounds = torch.tensor([5, 6, 5, 5]), torch.tensor([0, 0, 1, 0])
    batch = uniforms(seeds, rounds, Stream.TREE, 7)
    for i in range(4):
        assert torch.equal(uniforms(seeds[i : i + 1], rounds[i : i + 1], Stream.TREE, 7)[0], batch[i])
    assert torch.equal(batch[0], batch[3])
    assert torch.equal(uniforms(seeds, rounds, Stream.TREE, 3), batch[:, :3])


def test_streams_rounds_and_seeds_are_uniform_and_unrelated() -> None:
    n = 20_000
    counting = torch.arange(n)
    fixed = torch.zeros(n, dtype=torch.int64)
    columns = torch.cat(
        [
            uniforms(counting, fixed, Stream.TREE, 2),  # consecutive seeds
            uniforms(fixed, counting, Stream.TREE, 2),  # consecutive rounds
            uniforms(counting, fixed, Stream.VERIFY, 2),
        ],
        dim=1,
    )
    assert float(columns.min()) >= 0
    assert float(columns.max()) < 1
    for column in columns.T:
        counts = torch.histc(column.float(), 100, 0, 1)
        statistic = ((counts - n / 100) ** 2 / (n / 100)).sum()
        assert 50 < float(statistic) < 165  # chi-square, 99 degrees: p-values beyond 1e-5 on either side
    correlation = torch.corrcoef(columns.T) - torch.eye(6)
    assert float(correlation.abs().max()) < 5 / n**0.5
