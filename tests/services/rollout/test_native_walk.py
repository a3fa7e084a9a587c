"""The compiled walk decides what the walk in PyTorch decides, and the law of what it emits is the enumerated one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from services.rollout.sglang_plugin.native_walk import NativeWalk, load
from specroll_core.goodness_of_fit import chi_square_p, holm_rejects
from specroll_core.growth import TreeOptions
from specroll_core.law import LawParams
from specroll_core.scorer import CountTableScorer
from specroll_core.verify import verify
from tests.core.test_verify import TREES, Contrary
from tests.core.toy import Setting, ToyLanguage, decode, grow, one_law

LAWS = {"T=1": {}, "T=0.6": {"temperature": 0.6}, "T=1.5": {"temperature": 1.5}, "greedy": {"temperature": 0.0}}


@pytest.fixture
def native():
    found = load()
    assert found is not None, "the tests need a C++ compiler"
    return found


def assert_same(one, other):
    for name in ("tokens", "lengths", "nodes"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name in ("logprobs", "child_probs", "slot_accept", "slot_remainder"):
        torch.testing.assert_close(
            getattr(one, name), getattr(other, name), atol=4e-6, rtol=4e-6, equal_nan=True, msg=name
        )


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [5, 16, 700])
@pytest.mark.parametrize("law", LAWS.values(), ids=list(LAWS))
def test_both_walks_decide_the_same(native, law, vocab, dtype):
    met = 0
    trees = [*TREES.values(), (12, TreeOptions(max_depth=5))]
    for seed, (nodes, options) in enumerate(trees if vocab < 700 else trees[2:5]):
        for scorer in (CountTableScorer(tail_share=1.0), Contrary()):
            toy = ToyLanguage(vocab=vocab, seed=seed, longest=3 if vocab < 700 else 1)
            ids = [0, 2, 3] if seed % 3 == 2 else list(range(1, vocab, 2)) if seed % 3 == 1 else None
            setting = Setting(law, nodes, options, scorer, ids=ids)
            g = torch.Generator().manual_seed(seed)
            states = torch.arange(60) % 31
            tree, proposal = grow(toy, setting, states, torch.rand(60, nodes, dtype=torch.float64, generator=g))
            logits = toy.logits(toy.node_prefixes(tree, states).flatten()).to(dtype)
            uniforms = torch.rand(60, tree.depth + 3, 2, dtype=torch.float64, generator=g)
            # Every other request is greedy: batches are mixed.
            some = dataclasses.replace(one_law(law, 60), any_greedy=True)
            some.temperature[::2] = 0
            whole = logits.view(60, nodes, vocab).float()
            expected = verify(tree, whole, some, uniforms, proposal.laws, on_host=True)
            assert NativeWalk.fits(logits, some)
            assert_same(native.verify(tree, logits, some, uniforms, proposal.laws), expected)
            met += int((~expected.slot_accept.isnan()).sum())
    assert met > 30 or law.get("temperature") == 0  # greedy requests get no sampled children


def test_the_law_of_sequences_holds(native, monkeypatch):
    """A hundred thousand draws of its own per cell, not by comparison."""
    p_values = []

    def walk(tree, node_logits, params, uniforms, laws, **_):
        B, N = tree.tokens.shape
        row, node = torch.arange(B).repeat_interleave(N), torch.arange(N).repeat(B)
        return native.verify(tree, node_logits(row, node), params, uniforms, laws)

    monkeypatch.setattr("tests.core.toy.verify", walk)
    for seed, law in enumerate(({}, {"temperature": 0.6}, {"temperature": 1.5})):
        for nodes, scorer in ((2, Contrary()), (6, CountTableScorer(tail_share=1.0)), (6, Contrary())):
            toy = ToyLanguage(vocab=3 + seed, seed=70 + seed)
            exact = toy.sequence_law(2, law)
            numbers, _, _ = decode(toy, Setting(law, nodes, scorer=scorer), 2, 100_000, seed=80 + seed)
            p_values.append(chi_square_p(numbers.bincount(minlength=len(exact)), exact))
    assert holm_rejects(p_values, 0.001) == []


def test_a_token_without_probability_never_comes(native):
    """Whatever the uniform, and whatever stands in the other places."""
    toy = ToyLanguage(vocab=600, seed=3, longest=1)
    tree, proposal = grow(toy, Setting({}, 1), torch.zeros(400, dtype=torch.int64), torch.zeros(400, 1).double())
    logits = torch.full((400, 600), -torch.inf)
    logits[:, 37], logits[:, 555] = 0.0, -3.0
    uniforms = torch.linspace(0, 1, 400, dtype=torch.float64).clamp_max(1 - 2**-53).view(400, 1, 1).repeat(1, 1, 2)
    found = native.verify(tree, logits, one_law({}, 400), uniforms, proposal.laws)
    assert set(found.tokens.flatten().tolist()) == {37, 555}
    share = float((found.tokens == 555).double().mean())
    assert share == pytest.approx(torch.tensor([0.0, -3.0]).softmax(0)[1].item(), abs=1 / 300)


@pytest.mark.parametrize(("name", "value"), [("top_k", 3), ("top_p", 0.9), ("min_p", 0.1)])
def test_filters_are_left_to_pytorch(name, value):
    params = LawParams.build([1.0], **{name: [value]})
    assert not NativeWalk.fits(torch.zeros(1, 8), params)
    assert NativeWalk.fits(torch.zeros(1, 8), LawParams.build([0.7]))
    assert not NativeWalk.fits(torch.zeros(1, 8, dtype=torch.float64), LawParams.build([0.7]))
