"""The compiled attention against a naive loop over queries and heads."""

from __future__ import annotations

import math

import pytest
import torch

from services.rollout.sglang_plugin.attention import trees_of
from services.rollout.sglang_plugin.native_attention import Queries, fits, load
from tests.paged_pool import HEADS, make_pool, naive_attention, random_trees, seen_in_trees

SIZES = [32, 64, 96, 128]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}


@pytest.fixture
def native():
    found = load()
    assert found is not None, "the tests need a C++ compiler"
    return found


def compare(native, dtype, size, lengths, trees, q, pool, tolerance=None):
    """trees: [B, nodes, nodes] bool, or None: each request has one query, which sees all of its keys."""
    keys, values, table, requests, _ = pool
    q, keys, values = q.to(dtype), keys.to(dtype), values.to(dtype)
    nodes = 1 if trees is None else trees.shape[1]
    queries = Queries(torch.tensor(requests), torch.tensor(lengths), nodes, trees)
    got = native.attend(q, keys, values, table, queries, size**-0.5)
    seen = [torch.ones(1, n, dtype=torch.bool) for n in lengths] if trees is None else seen_in_trees(lengths, trees)
    expected = naive_attention(q.float(), keys.float(), values.float(), table, requests, seen)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=tolerance or TOLERANCE[dtype], rtol=0)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lengths", [[1], [16], [40], [17, 17, 17], [33, 2, 90, 128, 48]], ids=str)
def test_decode_sees_every_key_of_its_request(native, lengths, size, dtype):
    pool = make_pool(lengths, size)
    q = torch.randn(len(lengths), HEADS, size, generator=pool[-1])
    compare(native, dtype, size, lengths, None, q, pool)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("lengths", "nodes"),
    [([9], 1), ([15], 2), ([30, 30], 5), ([33, 2, 90, 41, 40], 8), ([1, 100], 24), ([1, 2], 3), ([96], 32)],
    ids=str,
)
def test_verification_sees_the_prefix_and_the_ancestors(native, lengths, nodes, size, dtype):
    pool = make_pool([n + nodes for n in lengths], size)
    trees = random_trees(len(lengths), nodes, pool[-1])
    q = torch.randn(len(lengths) * nodes, HEADS, size, generator=pool[-1])
    compare(native, dtype, size, lengths, trees, q, pool)


def test_scores_far_from_each_other_and_from_zero(native):
    lengths = [70]
    pool = make_pool([n + 4 for n in lengths], 64)
    trees = random_trees(1, 4, pool[-1])
    for factor in (1e-3, 30.0, 1e3):  # scores of 3e4: an exponential without the largest taken off would be infinite
        q = factor * torch.randn(4, HEADS, 64, generator=pool[-1])
        # A score's rounding grows with the score, and moves the weights by as much.
        compare(native, torch.float32, 64, lengths, trees, q, pool, tolerance=max(2e-6, 2e-6 * factor))


def test_a_value_that_is_not_a_number_is_not_hidden(native):
    keys, values, table, requests, generator = make_pool([40], 64)
    q = torch.randn(1, HEADS, 64, generator=generator)
    q[0, 2, 5] = math.nan
    got = native.attend(q, keys, values, table, Queries(torch.tensor(requests), torch.tensor([40]), 1), 0.125)
    wrong = got.view(HEADS, 64).isnan().all(-1)
    assert wrong.tolist() == [h == 2 for h in range(HEADS)]


def test_a_view_of_queries_is_read_as_what_it_shows(native):
    keys, values, table, requests, generator = make_pool([40, 12], 64)
    wide = torch.randn(2, HEADS + 4, 64, generator=generator)
    compare(native, torch.float32, 64, [40, 12], None, wide[:, :HEADS], (keys, values, table, requests, generator))


@pytest.mark.parametrize(
    ("dtype", "size", "value_size"),
    [(torch.float16, 64, 64), (torch.float64, 64, 64), (torch.bfloat16, 80, 80), (torch.bfloat16, 128, 64)],
    ids=str,
)
def test_other_heads_are_left_to_pytorch(dtype, size, value_size):
    assert not fits(dtype, size, value_size)


def test_masks_of_whole_sequences_and_of_trees_are_the_same():
    lengths, nodes = [3, 7, 1], 4
    trees = random_trees(3, nodes, torch.Generator().manual_seed(1))
    full = torch.cat([s.flatten() for s in seen_in_trees(lengths, trees)])
    assert trees_of(full, lengths, nodes).equal(trees)
    assert trees_of(trees.flatten(), lengths, nodes).equal(trees)
