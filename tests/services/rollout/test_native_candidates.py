"""Compiled candidates and uniforms against doubles and against `randomness.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from services.rollout.sglang_plugin import native_candidates, native_uniforms
from services.rollout.sglang_plugin.spec_sampling import round_uniforms
from specroll_core.heads import ProposalVocabulary
from specroll_core.law import LawParams


@pytest.fixture
def native():
    found = native_candidates.load()
    assert found is not None, "the tests need a C++ compiler"
    return found


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 15, 16, 63, 64, 65, 700, 4096])
@pytest.mark.parametrize("subset", [False, True])
def test_laws_are_softmaxes_and_candidates_their_largest(native, subset, columns, dtype):
    g = torch.Generator().manual_seed(columns)
    ids = torch.randperm(2 * columns + 8, generator=g)[:columns].sort().values if subset else None
    vocabulary = ProposalVocabulary(torch.zeros(2 * columns + 8 if subset else columns, 1), ids)
    for rows, heads, width in ((1, 3, 16), (13, 4, 5), (7, 1, 1)):
        temperatures = [(0.0, 0.5, 0.8, 1.0, 2.0)[i % 5] for i in range(rows)]
        logits = (torch.randn(rows, heads, columns, generator=g) * 3).to(dtype)
        got = native.propose(logits, LawParams.build(temperatures), vocabulary, width=width)
        scale = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float64)[:, None, None]
        law = (logits.double() / scale).softmax(-1)
        torch.testing.assert_close(got.laws.probs.double(), law, atol=1e-9, rtol=5e-6)
        # The lower column first where two are equally likely, as often in bfloat16.
        order = got.laws.probs.sort(dim=-1, descending=True, stable=True).indices[..., :width]
        assert torch.equal(got.tokens, order if ids is None else ids[order])
        torch.testing.assert_close(got.log_q, got.laws.probs.gather(-1, order).log(), atol=1e-6, rtol=1e-6)
        without = native.propose(logits, LawParams.build(temperatures), vocabulary, width=width, with_laws=False)
        assert without.laws is None
        assert torch.equal(without.tokens, got.tokens)


def test_columns_without_probability_keep_a_finite_logarithm(native):
    logits = torch.full((1, 2, 100), -torch.inf)
    logits[..., 70], logits[0, 0, 30] = 1e4, 1e4
    got = native.propose(logits, LawParams.build([1.0]), ProposalVocabulary(torch.zeros(100, 1)), width=3)
    assert got.tokens.tolist() == [[[30, 70, 0], [70, 0, 1]]]
    assert got.laws.probs[0, 0, [30, 70]].tolist() == [0.5, 0.5]
    assert got.log_q.isfinite().all()
    assert got.log_q[0, 1, 1] < -80


def test_filters_of_a_request_do_not_touch_what_is_proposed(native):
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    vocabulary = ProposalVocabulary(torch.zeros(50, 1))
    plain = native.propose(logits, LawParams.build([1.0, 1.0]), vocabulary).laws.probs.clone()
    filtered = native.propose(logits, LawParams.build([1.0, 1.0], top_k=[3, -1], top_p=[1.0, 0.5]), vocabulary)
    assert torch.equal(plain, filtered.laws.probs)


def test_other_types_are_left_to_pytorch(native):
    logits = torch.randn(2, 3, 50, dtype=torch.float64)
    got = native.propose(logits, LawParams.build([1.0, 0.5]), ProposalVocabulary(torch.zeros(50, 1)))
    torch.testing.assert_close(got.laws.probs[0], logits[0].float().softmax(-1))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_uniforms_are_those_of_the_tensor_code(rows):
    native = native_uniforms.load()
    assert native is not None, "the tests need a C++ compiler"
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), *range(5, 41)])[:rows]
    for nodes, levels, dtype in ((1, 1, torch.int64), (16, 9, torch.int32), (8, 4, torch.int64)):
        asked = SimpleNamespace(sampling_seed=seeds), torch.arange(7, 7 + rows, dtype=dtype), nodes, levels
        for one, other in zip(native(*asked), round_uniforms(*asked), strict=True):
            assert one.shape == other.shape
            assert torch.equal(one, other)
