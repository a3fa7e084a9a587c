from __future__ import annotations

import torch

from specroll_core.growth import TreeOptions
from specroll_core.heads import ProposalVocabulary
from specroll_core.law import LawParams
from specroll_core.proposal import PathCandidate, propose_from_logits
from specroll_core.scorer import CountTableScorer
from specroll_core.sources import Source, accepted_sources, source_of
from specroll_core.tree import build_tree
from specroll_core.verify import verify


def test_the_cell_tells_who_suggested_a_token() -> None:
    scorer = CountTableScorer()
    for log_q, memory, expected in [
        (-0.1, 0.0, Source.HEADS),
        (-6.9, 0.0, Source.HEADS),
        (-20.0, 0.9, Source.MEMORY),
        (-20.0, 2e-4, Source.MEMORY),
        (-0.1, 0.9, Source.BOTH),
        (-6.9, 0.1, Source.BOTH),
    ]:
        for depth in (1, 2, 4, 8):
            order = 3 if memory else 0
            assert source_of(scorer.score(log_q, memory, order, depth).cell, sampled=False) is expected
    assert source_of(-1, sampled=True) is Source.SAMPLED


class Remembers:
    """A path proposer that knows one continuation: 5, then 6, then 1."""

    max_depth = 3

    def root(self) -> int:
        return 0

    def descend(self, state: int, token: int) -> int:
        return state + 1 if state >= 0 and token == (5, 6, 1)[state] else -1

    def children(self, state: int) -> list[PathCandidate]:
        return [PathCandidate((5, 6, 1)[state], 0.9, 4)] if 0 <= state < 3 else []


def test_sources_follow_the_walk() -> None:
    """The heads say 5 at depth 1 and 1 at depth 3; only memory says 6. The target says 5, 6, 1, then 2."""
    vocab = 8
    logits = torch.zeros(1, 3, vocab)
    logits[0, 0, 5] = logits[0, 1, 3] = logits[0, 2, 1] = 30.0
    vocabulary = ProposalVocabulary(torch.zeros(vocab, 4))
    proposal = propose_from_logits(logits, LawParams.build([1.0]), vocabulary, paths=[Remembers()], with_laws=False)
    uniforms = torch.full((1, 6), 0.5, dtype=torch.float64)
    tree = build_tree([0], proposal, CountTableScorer(), [6], uniforms, [False], TreeOptions(sampled_children=False))
    target = torch.full((1, 6, vocab), -30.0)
    for node in range(6):
        target[0, node, (5, 6, 1, 2)[int(tree.depths[0, node])]] = 30.0
    verified = verify(
        tree, target, LawParams.build([1.0]), torch.full((1, tree.depth + 1, 2), 0.5, dtype=torch.float64)
    )
    assert verified.tokens[0, :4].tolist() == [5, 6, 1, 2]
    assert accepted_sources(tree, verified) == [[Source.BOTH, Source.MEMORY, Source.BOTH]]
