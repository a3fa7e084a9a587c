"""The emitted law with the real trajectory memory, whose suggestions follow the drafted path.

Trees are grown one by one, so few of them can be; each is verified many times with coins of its own. Over trees, the
mean frequency of each pair of tokens must be its probability. Where a round emits one token, the second one's law is
the target's and enters exactly.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from specroll_core.goodness_of_fit import holm_rejects
from specroll_core.growth import TreeOptions
from specroll_core.law import final_logprobs
from specroll_core.memory import MemoryOptions, TrajectoryMemory
from specroll_core.memory_store import Stream, TokenStore
from specroll_core.proposal import DepthLaws
from specroll_core.scorer import CountTableScorer, Score, Scorer
from specroll_core.tree import DraftTree
from specroll_core.verify import verify
from tests.core.test_verify import FAMILY, Contrary
from tests.core.toy import Setting, ToyLanguage, copy_rows, grow, one_law

VOCAB = 3
TREES, COINS = 2_000, 60
LAW = {"temperature": 0.9, "top_p": 0.97}
PROMPT = (0, 1, 2, 2, 0, 1, 2, 0, 0, 1, 1, 2, 0)
SIBLING = (0, 1, 2, 0, 2, 1, 1, 0, 1, 2, 2, 2, 0)


class Eager(CountTableScorer):
    """Makes every last child sampled."""

    def tail(self, depth: int, mass: float, remainder: float) -> Score:
        return Score(1.0, -1)


def trusting() -> CountTableScorer:
    """Believes in each candidate alike."""
    scorer = Eager()
    scorer.counts[:] = 200.0
    return scorer


def p_values(scorer: Scorer, nodes: int, options: MemoryOptions, seed: int, tampered: bool = False) -> list[float]:
    """One for each pair of tokens that has a probability between 0 and 1."""
    toy = ToyLanguage(vocab=VOCAB, seed=seed)
    own, others = TokenStore(64), TokenStore(64)
    Stream(own, PROMPT)
    Stream(others, SIBLING)
    setting = Setting(
        LAW,
        nodes,
        TreeOptions(max_depth=5),
        scorer,
        paths=lambda _prefix: TrajectoryMemory(own, PROMPT, [(others, 0.5)], options),
    )
    g = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(TREES, nodes, dtype=torch.float64, generator=g)
    tree, proposal = grow(toy, setting, torch.zeros(TREES, dtype=torch.int64), uniforms)
    assert tree.depth >= 2
    assert tree.any_sampled
    if tampered:
        tree = dataclasses.replace(tree, slot_mass=torch.where(tree.sampled, 1.0, tree.slot_mass))
    first_two = frequencies(toy, tree, proposal.laws, g)
    expected = toy.sequence_law(2, LAW)
    open_ = (expected > 0) & (expected < 1)
    assert first_two[:, ~open_].abs().max() < 1e-9 if bool((~open_).any()) else True
    z = (first_two.mean(0) - expected) / (first_two.std(0) / math.sqrt(TREES)).clamp_min(1e-12)
    return [math.erfc(abs(float(x)) / math.sqrt(2)) for x in z[open_]]


def frequencies(toy: ToyLanguage, tree: DraftTree, laws: DepthLaws | None, g: torch.Generator) -> Tensor:
    """[trees, pairs]: how often each tree's rounds begin with each pair of tokens."""
    assert laws is not None
    which = torch.arange(TREES).repeat_interleave(COINS)
    copies = copy_rows(tree, which)
    prefixes = toy.node_prefixes(copies, torch.zeros(len(which), dtype=torch.int64))
    uniforms = torch.rand(len(which), tree.depth + 1, 2, dtype=torch.float64, generator=g)
    drawn = DepthLaws(laws.probs[which], laws.vocabulary)
    found = verify(
        copies, lambda r, n: toy.logits(prefixes[r, n]), one_law(LAW, len(which)), uniforms, drawn, on_host=False
    )
    first, second = found.tokens[:, 0], found.tokens[:, 1]
    after = final_logprobs(toy.logits(first + 1), one_law(LAW, len(first))).double().exp()
    known = torch.nn.functional.one_hot(second.clamp_min(0), VOCAB).double()
    after = torch.where((found.lengths >= 2)[:, None], known, after)
    pairs = torch.zeros(len(which), VOCAB, VOCAB, dtype=torch.float64)
    pairs[torch.arange(len(which)), first] = after
    return pairs.view(TREES, COINS, -1).mean(1)


@pytest.mark.parametrize("inside", [True, False], ids=["path", "suffix"])
def test_the_law_is_the_targets(inside: bool) -> None:
    values, names = [], []
    for seed, (name, scorer) in enumerate(
        {"contrary": Contrary(), "trusting": trusting(), "prior": Eager.with_prior()}.items()
    ):
        for nodes in (5, 8):
            found = p_values(scorer, nodes, MemoryOptions(inside_starts=inside), seed=10 * seed + nodes)
            values += found
            names += [f"{name} {nodes} {i}" for i in range(len(found))]
    assert [names[i] for i in holm_rejects(values, FAMILY)] == []
    assert 0.3 < sum(values) / len(values) < 0.7


def test_a_wrong_law_of_the_draw_is_detected() -> None:
    values = p_values(trusting(), 8, MemoryOptions(), seed=8, tampered=True)
    assert holm_rejects(values, FAMILY)
