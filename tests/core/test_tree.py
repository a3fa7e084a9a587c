from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from specroll_core.growth import TreeOptions
from specroll_core.heads import ProposalVocabulary
from specroll_core.law import LawParams
from specroll_core.memory import TrajectoryMemory
from specroll_core.memory_store import Stream, TokenStore
from specroll_core.proposal import PathCandidate, Proposal, propose_from_logits
from specroll_core.scorer import NO_LOG_Q, CountTableScorer
from specroll_core.tree import DraftTree, build_tree

DETERMINISTIC = TreeOptions(sampled_children=False)


def proposal_of(rows: int, depth: int = 3, vocab: int = 40, seed: int = 0, **options: object) -> Proposal:
    logits = torch.randn(rows, depth, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    vocabulary = ProposalVocabulary(torch.zeros(vocab, 1))
    return propose_from_logits(logits, LawParams.build([1.0] * rows), vocabulary, **options)  # type: ignore[arg-type]


def uniforms(rows: int, nodes: int = 24) -> Tensor:
    return torch.rand(rows, nodes, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check_structure(tree: DraftTree) -> None:
    for row in range(tree.tokens.shape[0]):
        ancestors: dict[int, set[int]] = {}
        seen = set()
        for node in range(tree.tokens.shape[1]):
            parent = int(tree.parents[row, node])
            if node == 0 or not tree.valid[row, node]:
                assert parent == -1
                assert int(tree.depths[row, node]) == 0
                ancestors[node] = {node}
            else:
                assert 0 <= parent < node
                assert bool(tree.valid[row, parent])
                assert int(tree.depths[row, node]) == int(tree.depths[row, parent]) + 1
                ancestors[node] = ancestors[parent] | {node}
                edge = (parent, int(tree.tokens[row, node]))
                assert edge not in seen, "siblings carry different tokens"
                seen.add(edge)
            assert set(tree.ancestor_mask[row, node].nonzero().squeeze(1).tolist()) == ancestors[node]
        for node in tree.sampled[row].nonzero().squeeze(1).tolist():
            siblings = (tree.parents[row] == tree.parents[row, node]).nonzero().squeeze(1)
            assert node == int(siblings.max()), "the sampled child is the last one"


@pytest.mark.parametrize("chain", [0, 3])
def test_trees_of_different_budgets_are_well_formed(chain: int) -> None:
    budgets = [1, 2, 5, 9, 16, 24]
    tree = build_tree(
        [7] * 6, proposal_of(6), CountTableScorer(), budgets, uniforms(6), options=TreeOptions(chain=chain)
    )
    assert (tree.drafted + 1).tolist() == budgets
    assert tree.depth <= 3
    check_structure(tree)


def test_the_tree_is_the_best_prefix_closed_set() -> None:
    proposal = proposal_of(4, depth=3, vocab=12, seed=5)
    scorer = CountTableScorer()
    c, _ = scorer.score_depths(proposal.log_q)
    tree = build_tree([0] * 4, proposal, scorer, [10] * 4, uniforms(4), options=DETERMINISTIC)
    for row in range(4):
        # Every path over the three ranked lists with its score, best first: scores never rise along a path, so
        # the best nine are prefix-closed.
        paths = []
        for depth in (1, 2, 3):
            for ranks in itertools.product(range(proposal.tokens.shape[-1]), repeat=depth):
                score = 1.0
                for d, rank in enumerate(ranks):
                    score *= float(c[row, d, rank])
                paths.append((score, tuple(int(proposal.tokens[row, d, r]) for d, r in enumerate(ranks))))
        expected = sorted((s for s, _ in paths), reverse=True)[:9]
        got = sorted(tree.path_scores[row, 1:].tolist(), reverse=True)
        assert got == pytest.approx(expected, rel=1e-5)


def test_the_chain_is_reserved() -> None:
    proposal = proposal_of(3, seed=8)
    tree = build_tree(
        [0] * 3,
        proposal,
        CountTableScorer(),
        [4] * 3,
        uniforms(3),
        options=TreeOptions(chain=3, sampled_children=False),
    )
    assert tree.depths.tolist() == [[0, 1, 2, 3]] * 3
    assert torch.equal(tree.tokens[:, 1:], proposal.tokens[:, :, 0])


def test_greedy_requests_get_no_sampled_children_and_the_shape_ignores_the_draw() -> None:
    proposal = proposal_of(2)
    scorer = CountTableScorer(tail_share=1.0)
    trees = [
        build_tree([0, 0], proposal, scorer, [8, 8], torch.full((2, 8), u, dtype=torch.float64), greedy=[True, False])
        for u in (0.01, 0.5, 0.99)
    ]
    assert not trees[0].sampled[0].any()
    assert trees[0].sampled[1].any()
    for tree in trees[1:]:
        assert torch.equal(tree.parents, trees[0].parents)
        assert torch.equal(tree.sampled, trees[0].sampled)
        assert torch.equal(tree.tokens[~tree.sampled], trees[0].tokens[~tree.sampled])
    assert not torch.equal(trees[0].tokens, trees[2].tokens)


class Continuation:
    """Suggests the successor of a token in a fixed sequence, surely, as a trajectory memory would."""

    max_depth = 8

    def __init__(self, sequence: list[int], pending: int) -> None:
        self.sequence, self.pending = sequence, pending

    def root(self) -> int:
        return self.pending

    def descend(self, state: int, token: int) -> int:
        return token

    def children(self, state: int) -> list[PathCandidate]:
        at = self.sequence.index(state) + 1 if state in self.sequence else len(self.sequence)
        return [PathCandidate(self.sequence[at], 0.95, 5)] if at < len(self.sequence) else []


def trusting_memory() -> CountTableScorer:
    """A scorer that has seen the memory's sure suggestions come true."""
    scorer = CountTableScorer(tail_share=1.0)
    for log_q, depth in itertools.product((NO_LOG_Q, -6.0, -4.0, -3.0, -2.0, -1.2, -0.7), (1, 2, 4, 8)):
        cell = scorer.score(log_q, 0.95, 5, depth).cell
        scorer.update(torch.full((1000,), cell), torch.full((1000,), 0.97))
    return scorer


def test_a_memory_extends_the_tree_past_the_heads_and_merges_with_them() -> None:
    sequence = [30, 31, 32, 33, 34, 35, 36, 37, 38, 39]
    proposal = proposal_of(1, paths=[Continuation(sequence, 30)])
    scorer = trusting_memory()
    tree = build_tree([30], proposal, scorer, [20], uniforms(1), options=DETERMINISTIC)
    check_structure(tree)
    assert tree.depth == 8
    node = int(tree.depths[0].argmax())
    path = []
    while node:
        path.append(int(tree.tokens[0, node]))
        node = int(tree.parents[0, node])
    assert path[::-1] == sequence[1:9]


def test_what_stands_below_a_sampled_child_follows_its_draw() -> None:
    sequence = list(range(40))
    scorer = trusting_memory()
    followed = 0
    for seed in range(30):
        proposal = proposal_of(1, seed=seed, paths=[Continuation(sequence, 39)])
        tree = build_tree([39], proposal, scorer, [12], uniforms(1) * (seed / 30))
        check_structure(tree)
        for slot in tree.sampled[0].nonzero().squeeze(1).tolist():
            below = tree.tokens[0, tree.parents[0] == slot].tolist()
            followed += int(tree.tokens[0, slot]) + 1 in below
    assert followed > 5


def test_more_nodes_than_candidates_leave_invalid_ones() -> None:
    proposal = proposal_of(1, depth=1, vocab=3)
    tree = build_tree([1], proposal, CountTableScorer(), [8], uniforms(1), width=10)
    assert int(tree.drafted) == 3
    assert tree.valid[0].tolist() == [True] * 4 + [False] * 6
    check_structure(tree)


def test_a_memory_alone_proposes_without_heads() -> None:
    store, tokens = TokenStore(64), (1, 2, 3, 4, 1, 2, 3, 4, 1, 2)
    Stream(store, tokens)
    proposal = Proposal.of_paths([TrajectoryMemory(store, tokens), None])
    tree = build_tree([2, 2], proposal, CountTableScorer(), [6, 6], torch.rand(2, 6, dtype=torch.float64))
    # What followed "1 2" each time, as a chain; and nothing where there is no memory.
    assert tree.tokens[0].tolist() == [2, 3, 4, 1, 2, 3]
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 3, 4]
    assert tree.drafted.tolist() == [5, 0]
    assert not tree.any_sampled


def test_a_tree_that_is_cut_is_the_smaller_tree() -> None:
    scorer = CountTableScorer.with_prior()
    seen: list[list[list[float]]] = []
    for nodes in (1, 2, 5, 8):

        def cut(scores: list[list[float]], nodes: int = nodes) -> int:
            seen.append(scores)
            return nodes

        small = build_tree([4, 2], proposal_of(2), scorer, [nodes] * 2, uniforms(2))
        large = build_tree([4, 2], proposal_of(2), scorer, [12] * 2, uniforms(2), cut=cut)
        for field in dataclasses.fields(DraftTree):
            one, other = getattr(small, field.name), getattr(large, field.name)
            assert one.equal(other) if isinstance(one, Tensor) else one == other, field.name
    assert len(seen) == 4
    for scores in seen:
        assert [len(s) for s in scores] == [11, 11]
        assert all(s == sorted(s, reverse=True) for s in scores)
