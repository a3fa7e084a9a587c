"""Attention over a paged pool against a naive loop over queries and heads."""

from __future__ import annotations

import math

import pytest
import torch

from services.rollout.sglang_plugin.attention import attend, plan_decode, plan_extend, plan_verify
from tests.paged_pool import CONTEXT, HEADS, make_pool, naive_attention, random_trees, seen_in_trees

DIM = 16
SCALE = DIM**-0.5
CHUNK_SIZES = [1, 90, 10_000]


def assert_attends(q, keys, values, chunks, expected, dtype=torch.float32):
    got = attend(q.to(dtype), keys.to(dtype), values.to(dtype), chunks, SCALE)
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("chunk_keys", CHUNK_SIZES)
@pytest.mark.parametrize("lengths", [[1], [40], [17, 17, 17], [33, 2, 90, 41, 40]])
def test_decode_sees_every_key_of_its_request(lengths, chunk_keys):
    keys, values, table, requests, generator = make_pool(lengths, DIM)
    q = torch.randn(len(lengths), HEADS, DIM, generator=generator)
    seen = [torch.ones(1, length, dtype=torch.bool) for length in lengths]
    chunks = plan_decode(table, requests, lengths, torch.float32, chunk_keys)
    assert_attends(q, keys, values, chunks, naive_attention(q, keys, values, table, requests, seen))


@pytest.mark.parametrize(("lengths", "prefixes"), [([1], [0]), ([90, 70, 12], [0, 69, 4]), ([100, 128, 3], [10, 0, 0])])
def test_extend_is_causal_after_the_prefix(lengths, prefixes):
    keys, values, table, requests, generator = make_pool(lengths, DIM)
    seen = [
        torch.ones(length - prefix, length, dtype=torch.bool).tril(prefix)
        for length, prefix in zip(lengths, prefixes, strict=True)
    ]
    q = torch.randn(sum(len(s) for s in seen), HEADS, DIM, generator=generator)
    chunks = plan_extend(table, requests, lengths, prefixes, torch.float32)
    assert_attends(q, keys, values, chunks, naive_attention(q, keys, values, table, requests, seen))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("chunk_keys", CHUNK_SIZES)
@pytest.mark.parametrize(("lengths", "nodes"), [([9], 1), ([30, 30], 5), ([33, 2, 90, 41, 40], 8)])
def test_verify_sees_the_prefix_and_the_ancestors(lengths, nodes, chunk_keys, full):
    keys, values, table, requests, generator = make_pool([length + nodes for length in lengths], DIM)
    trees = random_trees(len(lengths), nodes, generator)
    seen = seen_in_trees(lengths, trees)
    mask = torch.cat([s.flatten() for s in seen]) if full else trees.flatten()
    q = torch.randn(len(lengths) * nodes, HEADS, DIM, generator=generator)
    chunks = plan_verify(table, requests, lengths, nodes, mask, torch.float32, chunk_keys)
    assert_attends(q, keys, values, chunks, naive_attention(q, keys, values, table, requests, seen))


def test_bfloat16_is_close_to_the_exact_result():
    lengths, nodes = [50, 20], 6
    keys, values, table, requests, generator = make_pool([length + nodes for length in lengths], DIM)
    trees = random_trees(2, nodes, generator)
    q = torch.randn(2 * nodes, HEADS, DIM, generator=generator)
    seen = seen_in_trees(lengths, trees)
    expected = naive_attention(q, keys, values, table, requests, seen)
    chunks = plan_verify(table, requests, lengths, nodes, trees.flatten(), torch.bfloat16, 10_000)
    assert_attends(q, keys, values, chunks, expected, torch.bfloat16)


def test_a_chunk_never_exceeds_the_limit_unless_it_is_one_request():
    lengths = [100, 3, 50, 50, 7, 120, 9]
    table = torch.zeros(8, CONTEXT, dtype=torch.int32)
    chunks = plan_decode(table, list(range(7)), lengths, torch.float32, 110)
    rows = sorted(row for chunk in chunks for row in torch.arange(7)[chunk.rows].tolist())
    assert rows == list(range(7))
    assert all(chunk.requests * chunk.keys <= 110 or chunk.requests == 1 for chunk in chunks)
    assert math.prod(chunks[0].slots.shape) == chunks[0].requests * chunks[0].keys
