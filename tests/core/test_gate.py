from __future__ import annotations

import random

import pytest
import torch

from specroll_core.gate import Comparisons, GateOptions, PartGate, TreeTrace
from specroll_core.heads import ProposalVocabulary
from specroll_core.law import LawParams
from specroll_core.proposal import propose_from_logits
from specroll_core.scorer import CountTableScorer
from specroll_core.tree import build_tree

#      0 -> 1 (token 5), 2 (token 6), 3 (sampled); 1 -> 4 (token 7)
TRACE = TreeTrace([9, 5, 6, 0, 7], [-1, 0, 0, 0, 1], [False, False, False, True, False], [1.0, 0.5, 0.2, 0.06, 0.4])


@pytest.mark.parametrize(
    ("ahead", "accepted"),
    [([5, 7, 1], 2), ([5, 8], 1), ([6, 7], 1), ([8, 8], 0.2), ([], 0), ([5], 1)],
)
def test_a_trace_is_walked_along_what_was_emitted(ahead: list[int], accepted: float) -> None:
    assert TRACE.accepted(ahead) == pytest.approx(accepted)


def test_the_walk_is_unbiased_over_the_law() -> None:
    """Without sampled children the mean over emitted tokens is the sum over nodes of their path's probability."""
    logits = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(0))
    proposal = propose_from_logits(
        logits, LawParams.build([1.0]), ProposalVocabulary(torch.zeros(6, 1)), with_laws=False
    )
    tree = build_tree([0], proposal, CountTableScorer(), [9], torch.rand(1, 9, dtype=torch.float64))
    trace = TreeTrace.of(tree, 0)
    p = [0.3, 0.25, 0.2, 0.15, 0.06, 0.04]  # every token, independently
    expected = 0.0
    for node in range(1, 9):
        path, n = 1.0, node
        while n:
            path *= p[trace.tokens[n]]
            n = trace.parents[n]
        expected += path
    r = random.Random(0)
    draws = [trace.accepted(r.choices(range(6), p, k=3)) for _ in range(20_000)]
    assert sum(draws) / len(draws) == pytest.approx(expected, abs=0.02)


def feed(gate: PartGate, gain: float, count: int, r: random.Random) -> int:
    """Comparisons of trees that differ at times; returns after how many the part was switched, 0 for never."""
    state = gate.on
    for i in range(count):
        base = r.choice([0, 1, 2, 3])
        gate.record(base + (r.random() < 0.2 + gain) - (r.random() < 0.2), base)
        if gate.on != state:
            return i + 1
    return 0


def test_a_part_that_loses_is_switched_off_and_one_that_gains_comes_back() -> None:
    r = random.Random(1)
    gate = PartGate(GateOptions(window=1000))
    assert feed(gate, -0.1, 20_000, r) >= 200
    assert not gate.on
    assert gate.gain == pytest.approx(-0.1, abs=0.1)
    assert feed(gate, 0.1, 20_000, r) > 0
    assert gate.on
    assert gate.switches == 2


def test_a_part_that_makes_no_difference_stays_on() -> None:
    assert sum(feed(PartGate(), 0.0, 3000, random.Random(seed)) > 0 for seed in range(40)) <= 2


def test_halved_evidence_has_the_same_mean_and_a_larger_error() -> None:
    gate = PartGate()
    feed(gate, 0.05, 400, random.Random(2))
    gain, error = gate.gain, gate.standard_error
    gate.halve()
    assert gate.gain == pytest.approx(gain)
    assert gate.standard_error == pytest.approx(error)
    gate.record(10.0, 0.0)
    assert gate.gain > gain


def test_trees_wait_for_the_tokens_behind_them_and_are_dropped_with_their_slot() -> None:
    gate = PartGate()
    comparisons = Comparisons(gate, depth=3)
    worse = TreeTrace([9], [-1], [False], [1.0])
    comparisons.add(0, TRACE, worse)
    comparisons.observe(0, [5])
    comparisons.add(0, TRACE, worse)
    assert gate.comparisons == 0
    comparisons.observe(0, [7, 5])
    assert (gate.comparisons, gate.gain) == (1, 2)
    comparisons.observe(1, [1, 1, 1])  # another slot
    assert gate.comparisons == 1
    comparisons.open(0)  # the slot's next request
    comparisons.observe(0, [5, 5, 5])
    assert gate.comparisons == 1
    for _ in range(100):
        comparisons.add(0, TRACE, worse)
    comparisons.observe(0, [5, 7, 1])
    assert gate.comparisons == 17
    comparisons.close(0)


def test_a_round_in_so_many_is_due() -> None:
    gate = PartGate(GateOptions(every=4))
    assert [gate.due() for _ in range(8)] == [False, False, False, True] * 2
    with pytest.raises(ValueError, match="every"):
        GateOptions(every=0)
    with pytest.raises(ValueError, match="z"):
        GateOptions(z=0)
