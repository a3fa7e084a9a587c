import statistics

import pytest
import torch

from specroll_core.sfpo import AlphaSchedule, reposition


def test_alpha_stops_for_good_when_the_entropy_leaves_its_window():
    schedule = AlphaSchedule(0.8, window=4, tau=2.0)
    entropies = [1.0, 1.1, 0.9, 1.0, 1.05]
    scores = [schedule.observe(e) for e in entropies]
    assert scores[:4] == [0.0] * 4
    window = entropies[:4]
    assert scores[4] == pytest.approx((1.05 - statistics.fmean(window)) / statistics.pstdev(window))
    assert schedule.alpha == 0.8
    assert schedule.observe(0.2) < -2
    assert schedule.alpha == 0.0
    schedule.observe(1.0)
    assert schedule.alpha == 0.0


def test_constant_entropy_never_stops_and_state_goes_through_a_checkpoint():
    schedule = AlphaSchedule(0.5, window=2, tau=1.0)
    for _ in range(5):
        assert schedule.observe(1.0) == 0.0
    other = AlphaSchedule(0.5, window=2, tau=1.0)
    other.load_state(schedule.state())
    assert other.observe(1.0) == 0.0
    assert other.state() == schedule.state()


def test_reposition_is_linear_interpolation():
    start, fast = [torch.tensor([0.0, 2.0])], [torch.tensor([1.0, -2.0])]
    assert reposition(start, fast, 0.25)[0].tolist() == [0.25, 1.0]
    assert reposition(start, fast, 0.0)[0].tolist() == [0.0, 2.0]
