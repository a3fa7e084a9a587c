"""A tree that is only thought of has the shape of the one that would be built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specroll_core.counterfactual import proposal_of, shape_of
from specroll_core.gate import TreeTrace
from specroll_core.growth import TreeOptions
from specroll_core.heads import ProposalVocabulary
from specroll_core.law import LawParams
from specroll_core.proposal import PathCandidate, propose_from_logits
from specroll_core.scorer import CountTableScorer
from specroll_core.tree import build_tree


class Remembers:
    """Suggests one token after each, whatever the path."""

    max_depth = 5

    def root(self) -> int:
        return 3

    def descend(self, state: int, token: int) -> int:
        return token

    def children(self, state: int) -> list[PathCandidate]:
        return [PathCandidate((state + 1) % 12, 0.7, 4)]


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_shape_is_that_of_the_tree(sampled: bool, remembers: bool) -> None:
    """Above what was drawn: what stands below a sampled child depends on the draw, and no comparison looks at it."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 3, 12, generator=g) * 2
    proposal = propose_from_logits(logits, LawParams.build([1.0] * 20), ProposalVocabulary(torch.zeros(12, 1)))
    paths = [Remembers() if remembers else None for _ in range(20)]
    proposal, scorer = replace(proposal, paths=paths), CountTableScorer.with_prior()
    options = TreeOptions(sampled_children=sampled)
    uniforms = torch.rand(20, 8, dtype=torch.float64, generator=g)
    tree = build_tree([0] * 20, proposal, scorer, [8] * 20, uniforms, None, options)
    slots = 0
    for row in range(20):
        built = TreeTrace.of(tree, row)
        thought = shape_of(proposal_of(proposal, row, paths[row]), scorer, 8, options, sampled=sampled)
        assert (thought.sampled, any(thought.sampled)) == (built.sampled, any(built.sampled)) or remembers
        drawn = {n for n in range(8) if thought.sampled[n]}
        slots += len(drawn)
        for n in range(1, 8):
            if n not in drawn and thought.parents[n] not in drawn:
                drawn_above = thought.parents[n]
                while drawn_above > 0 and drawn_above not in drawn:
                    drawn_above = thought.parents[drawn_above]
                if drawn_above <= 0:
                    assert (thought.tokens[n], thought.parents[n]) == (built.tokens[n], built.parents[n])
                    assert thought.steps[n] == built.steps[n]
        for ahead in torch.randint(12, (30, 5), generator=g).tolist():
            assert thought.accepted(ahead) == built.accepted(ahead)
    assert (slots > 0) == sampled


def test_another_path_proposer_is_another_tree() -> None:
    logits = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0))
    proposal = propose_from_logits(logits, LawParams.build([1.0] * 2), ProposalVocabulary(torch.zeros(12, 1)))
    scorer, options = CountTableScorer.with_prior(), TreeOptions()
    without = shape_of(proposal_of(proposal, 1, None), scorer, 8, options, sampled=True)
    remembering = shape_of(proposal_of(proposal, 1, Remembers()), scorer, 8, options, sampled=True)
    assert remembering.accepted([4, 5, 6]) == 2
    assert without.accepted([4, 5, 6]) < 2
