"""Compiled trees are those of `build_tree` in every field, and what is emitted with them has the enumerated law."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from services.rollout.sglang_plugin import native_code, native_growth
from services.rollout.sglang_plugin.compiled_parts import CompiledParts
from services.rollout.sglang_plugin.native_growth import NativeGrowth, load
from specroll_core.goodness_of_fit import chi_square_p, holm_rejects
from specroll_core.growth import TreeOptions
from specroll_core.heads import ProposalVocabulary
from specroll_core.law import LawParams
from specroll_core.memory import MemoryOptions
from specroll_core.memory_store import Stream
from specroll_core.proposal import Proposal, propose_from_logits
from specroll_core.reflex import MemoryClasses
from specroll_core.scorer import CELLS, CountTableScorer
from specroll_core.tree import DraftTree, build_tree
from tests.core.test_verify import Contrary
from tests.core.toy import Setting, ToyLanguage, decode


@pytest.fixture
def native():
    found = load()
    assert found is not None, "the tests need a C++ compiler"
    return found


def assert_same(one: DraftTree, other: DraftTree, proposal: Proposal) -> None:
    # Where there are more columns PyTorch adds up blocks of them in float32.
    exact = proposal.laws is None or proposal.laws.probs.shape[-1] <= 512
    for field in dataclasses.fields(DraftTree):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "slot_mass":
            torch.testing.assert_close(a, b, atol=1e-12 if exact else 3e-7, rtol=0)
        elif isinstance(a, Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), field.name
        else:
            assert a == b, field.name


def random_scorer(r: random.Random) -> CountTableScorer:
    """One that trusts memory here and heads there, as its counts happen to say."""
    temperatures = r.choice([(1.6,), (1.0, 1.5, 2.0, 2.5)])
    scorer = CountTableScorer(temperatures, tail_share=r.choice([0.0, 0.3, 1.0]))
    if r.random() < 0.7:
        g = torch.Generator().manual_seed(r.randrange(1 << 30))
        scorer.update(torch.arange(CELLS).repeat(5), torch.rand(5 * CELLS, generator=g))
        tails = torch.arange(scorer.tail_counts.shape[1]).repeat(5)
        scorer.update_tails(tails, torch.rand(len(tails), generator=g), torch.ones(len(tails)))
    return scorer


def random_paths(r: random.Random, classes: MemoryClasses, rows: int, tokens: list[int]) -> list:
    """A memory for most rows: some with others' stores, some with rings that have come round, some from suffixes."""
    paths = []
    for _ in range(rows):
        capacity, count = r.choice([40, 500]), r.choice([0, 1, 30, 200])
        options = MemoryOptions(inside_starts=r.random() < 0.7, max_depth=r.choice([1, 2, 8, 8]), floor=0.02)
        own, far = classes.store(capacity), [(classes.store(capacity), weight) for weight in (0.1, 0.03)]
        said = [r.choice(tokens) for _ in range(count)]
        Stream(own, said)
        for store, _ in far:
            writers = [Stream(store, said[:20]), Stream(store)]
            for _ in range(40):
                r.choice(writers).extend([r.choice(tokens) for _ in range(3)])
        memory = classes.memory(own, said, far[: r.randrange(3)], options)
        paths.append(memory if r.random() < 0.8 else None)
    return paths


def case(seed: int, classes: MemoryClasses) -> dict:
    """The arguments of `build_tree`: equal for equal seeds but for the classes of the memories."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, depth, vocab = r.choice([1, 1, 2, 7]), r.choice([1, 3, 3, 4]), r.choice([3, 12, 40, 700])
    ids = torch.randperm(vocab, generator=g)[: max(2, vocab * 2 // 3)].sort().values if r.random() < 0.5 else None
    vocabulary = ProposalVocabulary(torch.zeros(vocab, 1), ids)
    budgets = [r.choice([1, 2, 5, 9, 17, 30]) for _ in range(rows)]
    width = max(budgets) + r.choice([0, 0, 4]) if r.random() < 0.5 else None
    # Of few tokens, or memory and heads would never name the same ones.
    likely = torch.randperm(vocab, generator=g)[:12].tolist()
    paths = random_paths(r, classes, rows, likely) if r.random() < 0.8 else ()
    logits = torch.randn(rows, depth, vocab, generator=g) * 1.5
    logits[..., likely] += 2
    if r.random() < 0.15:
        paths = paths or [None] * rows
        proposal = Proposal.of_paths(paths)
    else:
        proposal = propose_from_logits(
            logits if ids is None else logits[..., ids],
            LawParams.build([r.choice([0.0, 0.6, 1.0]) for _ in range(rows)]),
            vocabulary,
            width=r.choice([4, 12, 24]),
            with_laws=r.random() < 0.85,
            paths=paths,
        )
    least = r.choice([1, 2, 6])
    return {
        "pending": [r.choice(likely) for _ in range(rows)],
        "proposal": proposal,
        "scorer": random_scorer(r),
        "budgets": budgets,
        "uniforms": torch.rand(rows, 40, dtype=torch.float64, generator=g)[:, : r.choice([34, 40])],
        "greedy": [r.random() < 0.3 for _ in range(rows)] if r.random() < 0.5 else None,
        "options": TreeOptions(r.choice([2, 8, 8]), sampled_children=r.random() < 0.85, chain=r.choice([0, 0, 3])),
        "width": width,
        "cut": (lambda _: min(least, max(budgets))) if r.random() < 0.3 else None,
    }


def scores_of(build, arguments: dict) -> list[list[float]]:
    """What the cut of a tree sees."""
    seen = []

    def cut(scores):
        seen.extend(scores)
        return 1

    build(**arguments | {"cut": cut})
    return seen


def test_trees_are_equal_in_every_field(native):
    sampled = below = remembered = unused = cut = 0
    for seed in range(1200):
        expected, given = case(seed, MemoryClasses()), case(seed, native.classes)
        assert native.fits(given["proposal"], given["scorer"])
        one, other = build_tree(**expected), native.build_tree(**given)
        assert_same(one, other, given["proposal"])
        if expected["cut"] is not None:
            # Before they are rounded, since a cut decides by them.
            assert scores_of(build_tree, expected) == scores_of(native.build_tree, given)
            cut += 1
        sampled += int(one.sampled.sum())
        below += int((one.sampled.gather(1, one.parents.clamp_min(0)) & (one.parents > 0)).sum())
        remembered += int((one.depths > given["proposal"].tokens.shape[1]).sum())
        unused += int((~one.valid).sum())
    assert min(sampled, below, remembered, unused, cut) > 100, (sampled, below, remembered, unused, cut)


def test_one_growth_serves_scorers_and_counts_as_they_change(native):
    for seed in range(60):
        expected, given = case(seed, MemoryClasses()), case(seed, native.classes)
        scorer = given["scorer"]
        for _ in range(2):
            scorer.update(torch.arange(CELLS), torch.rand(CELLS))
            scorer.update_tails(torch.arange(20), torch.rand(20), torch.rand(20))
            assert_same(build_tree(**expected | {"scorer": scorer}), native.build_tree(**given), given["proposal"])
            scorer.halve()


def test_draws_from_many_columns_are_those_of_their_law(native):
    """Of blocks, with excluded columns and columns of probability 0, at every part of the unit interval."""
    rows, vocab = 2000, 1000
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 1, vocab, generator=g).repeat(rows, 1, 1)
    logits[..., 512:768] = -torch.inf
    logits[..., 5] = 6.0
    proposal = propose_from_logits(logits, LawParams.build([1.0] * rows), ProposalVocabulary(torch.zeros(vocab, 1)))
    uniforms = torch.linspace(0, 1 - 2**-53, rows, dtype=torch.float64)[:, None].repeat(1, 3)
    scorer = CountTableScorer(tail_share=1.0)
    trees = [build([0] * rows, proposal, scorer, [3] * rows, uniforms) for build in (build_tree, native.build_tree)]
    assert trees[0].sampled.sum() == rows
    row, slot = trees[1].sampled.nonzero(as_tuple=True)
    drawn = trees[1].tokens[row, slot]
    assert not ((drawn == 5) | ((drawn >= 512) & (drawn < 768))).any()
    # Next to a boundary between two tokens the sums' last digits decide.
    assert (trees[0].tokens != trees[1].tokens).sum() <= 2
    torch.testing.assert_close(trees[0].slot_mass, trees[1].slot_mass, atol=3e-7, rtol=0)


def test_the_law_of_sequences_holds(native, monkeypatch):
    """A hundred thousand draws of its own per cell, not by comparison."""
    monkeypatch.setattr("tests.core.toy.build_tree", native.build_tree)
    scorers = [CountTableScorer(tail_share=1.0), CountTableScorer(tail_share=1.0)]
    # One that takes for likely what is not, so that trees are odd and many children are sampled.
    scorers[1].update(torch.arange(CELLS).repeat(50), torch.linspace(1, 0, CELLS).repeat(50))
    own, others = native.classes.store(64), native.classes.store(64)
    Stream(own, [0, 1, 2, 0, 1, 1, 0, 2])
    Stream(others, [1, 2, 2, 0, 1])
    p_values, drafted = [], []
    for seed, law in enumerate(({}, {"temperature": 0.6}, {"top_k": 2})):
        for scorer in scorers:
            for with_memory in (False, True):
                toy = ToyLanguage(vocab=3, seed=170 + seed)
                exact = toy.sequence_law(2, law)
                setting = Setting(law, 6, scorer=scorer)
                if with_memory:
                    setting.paths = lambda _: native.classes.memory(own, [1, 0, 2], [(others, 0.5)])
                numbers, _, per_round = decode(toy, setting, 2, 100_000, seed=180 + seed)
                p_values.append(chi_square_p(numbers.bincount(minlength=len(exact)), exact))
                drafted.append(per_round)
    assert holm_rejects(p_values, 0.001) == []
    assert min(drafted) > 1.1


def test_what_there_is_no_code_for_goes_to_python(native, monkeypatch):
    given = case(3, MemoryClasses())
    given["proposal"] = dataclasses.replace(
        given["proposal"], paths=random_paths(random.Random(0), MemoryClasses(), 1, [1])
    )
    given |= {"pending": [1], "budgets": [4], "uniforms": torch.zeros(1, 4, dtype=torch.float64), "width": 4}
    asked = []
    monkeypatch.setattr(native_growth, "build_tree", lambda *_: asked.append(1))
    for arguments in ({}, {"scorer": Contrary()}):
        native.build_tree(**given | {"greedy": None} | arguments)
    assert len(asked) == 2
    assert not NativeGrowth.fits(given["proposal"], given["scorer"])


def test_without_a_compiler_python_goes_on(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECROLL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setattr(native_code.shutil, "which", lambda _: None)
    monkeypatch.setattr(native_growth, "library", native_code.library.__wrapped__)
    assert load() is None
    assert CompiledParts(growth=load()).memory == MemoryClasses()
