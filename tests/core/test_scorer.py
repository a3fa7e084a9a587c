from __future__ import annotations

import math

import pytest
import torch

from specroll_core.scorer import CELLS, NO_LOG_Q, PRIOR_TRIALS_KEPT, CountTableScorer


def test_the_prior_is_the_closed_form() -> None:
    scorer = CountTableScorer(temperatures=(1.6, 2.0))
    for log_q, memory, depth, tau in ((-1.0, 0.0, 1, 1.6), (-0.01, 0.5, 2, 2.0), (-4.0, 0.9, 6, 2.0)):
        expected = 1 - (1 - min(0.9, math.exp(log_q / tau))) * (1 - 0.6 * memory)
        assert scorer.score(log_q, memory, 3, depth).c == pytest.approx(expected)


def test_scores_of_tensors_and_of_single_candidates_agree() -> None:
    scorer = CountTableScorer(temperatures=(1.2, 1.4))
    g = torch.Generator().manual_seed(0)
    scorer.update(torch.randint(0, CELLS, (5000,), generator=g), torch.rand(5000, generator=g))
    log_q = -8 * torch.rand(2, 5, 30, generator=g)
    log_q[0, 0, :6] = torch.tensor([-7.0, -5.0, -3.5, -2.5, -1.0, -0.5])  # on edges that float32 holds exactly
    c, cells = scorer.score_depths(log_q)
    for b in range(2):
        for d in range(5):
            for m in range(30):
                single = scorer.score(float(log_q[b, d, m]), 0.0, 0, d + 1)
                assert int(cells[b, d, m]) == single.cell
                assert float(c[b, d, m]) == pytest.approx(single.c, rel=1e-5)


def test_every_cell_is_reached_once() -> None:
    scorer = CountTableScorer()
    log_qs = (-9.0, -6.0, -4.0, -3.0, -2.0, -1.2, -0.7, -0.3, -0.1)
    memories = (0.0, 0.01, 0.1, 0.2, 0.4, 0.5, 0.7, 0.9)
    cells = {
        scorer.score(q, p, order, depth).cell
        for q in log_qs
        for p in memories
        for order in (0, 1, 2, 4, 8)
        for depth in (1, 2, 4, 8)
    }
    assert cells == set(range(CELLS))


def test_counts_converge_to_the_hit_rate_and_forget() -> None:
    scorer = CountTableScorer()
    cell = scorer.score(-2.0, 0.3, 2, 1).cell
    for rate in (0.7, 0.2):
        for _ in range(400):
            scorer.update(torch.full((100,), cell), torch.full((100,), rate))
        assert scorer.score(-2.0, 0.3, 2, 1).c == pytest.approx(rate, abs=0.01)


def test_single_candidates_follow_every_credit() -> None:
    scorer = CountTableScorer()
    g = torch.Generator().manual_seed(5)
    for _ in range(300):  # some cells past the trials at which they forget
        log_q = torch.rand(1, 3, 4, generator=g) * -8
        c, cells = scorer.score_depths(log_q)
        singles = [[scorer.score(float(log_q[0, d, m]), 0.0, 0, d + 1) for m in range(4)] for d in range(3)]
        assert [[s.cell for s in row] for row in singles] == cells[0].tolist()
        torch.testing.assert_close(torch.tensor([[s.c for s in row] for row in singles]), c[0], rtol=1e-5, atol=1e-6)
        credited = cells.repeat(1, 1, 40).flatten()
        credited[::7] = -1
        scorer.update(credited, torch.rand(credited.shape, generator=g))
    assert float(scorer.counts[1].max()) == pytest.approx(4096)


def test_halving_doubles_the_weight_of_the_prior() -> None:
    scorer = CountTableScorer()
    before = scorer.score(NO_LOG_Q, 0.5, 5, 1)
    scorer.update(torch.full((16,), before.cell), torch.ones(16))
    assert scorer.score(NO_LOG_Q, 0.5, 5, 1).c == pytest.approx((16 + 8 * before.c) / 24)
    scorer.halve()
    assert scorer.score(NO_LOG_Q, 0.5, 5, 1).c == pytest.approx((8 + 8 * before.c) / 16)


def test_tails_are_a_share_of_what_the_siblings_leave() -> None:
    scorer = CountTableScorer(tail_share=0.5)
    tail = scorer.tail(1, 0.6, 0.4)
    assert tail.c == pytest.approx(0.2)
    scorer.update_tails(torch.full((4000,), tail.cell), torch.full((4000,), 0.3), torch.full((4000,), 0.4))
    assert scorer.tail(1, 0.6, 0.4).c == pytest.approx(0.3, abs=0.002)
    assert scorer.tail(1, 0.6, -0.2).c == 0
    scorer.update_tails(torch.tensor([-1]), torch.tensor([1.0]), torch.tensor([1.0]))  # no cell, no effect
    assert scorer.tail(4, 0.6, 1.0).c == pytest.approx(0.5)


def test_the_shipped_prior_is_worth_few_trials_and_ranks_candidates_as_they_are() -> None:
    scorer = CountTableScorer.with_prior()
    hits, trials = scorer.counts
    assert bool((hits >= 0).all())
    assert bool((hits <= trials).all())
    assert 0 < float(trials.max()) <= PRIOR_TRIALS_KEPT
    assert int((trials > 0).sum()) > 300
    assert bool((scorer.tail_counts[0] <= scorer.tail_counts[1]).all())
    for depth in (1, 2, 3):
        by_head = [scorer.score(log_q, 0.0, 0, depth).c for log_q in (-6.0, -3.0, -1.2, -0.1)]
        assert by_head == sorted(by_head)
    by_memory = [scorer.score(NO_LOG_Q, p, 5, 1).c for p in (0.1, 0.4, 0.9)]
    assert by_memory == sorted(by_memory)
    assert scorer.score(-0.1, 0.9, 5, 1).c > 0.8
    # It gives way to what is observed.
    cell = scorer.score(-0.1, 0.9, 5, 1).cell
    scorer.update(torch.full((1000,), cell), torch.zeros(1000))
    assert scorer.score(-0.1, 0.9, 5, 1).c < 0.1


def test_what_nobody_visited_is_not_credited():
    scorer, expected = CountTableScorer(), CountTableScorer()
    nan = float("nan")
    scorer.update(torch.tensor([3, 5, -1, 3]), torch.tensor([0.25, nan, 1.0, 0.5]))
    scorer.update_tails(torch.tensor([2, 4]), torch.tensor([nan, 0.5]), torch.tensor([nan, 0.75]))
    expected.update(torch.tensor([3, 3]), torch.tensor([0.25, 0.5]))
    expected.update_tails(torch.tensor([4]), torch.tensor([0.5]), torch.tensor([0.75]))
    assert scorer.counts.equal(expected.counts)
    assert scorer.tail_counts.equal(expected.tail_counts)
    assert scorer.counts[:, 3].tolist() == [0.75, 2.0]
    assert scorer.tail_counts[:, 4].tolist() == [0.5, 0.75]
