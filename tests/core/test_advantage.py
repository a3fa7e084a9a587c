import math
import statistics

import pytest

from specroll_core.advantage import group_advantages, overlong_penalty


def advantages(rewards, included=None, normalise="std"):
    return group_advantages(rewards, included or [True] * len(rewards), normalise)


def test_values_are_standard_scores_with_the_population_deviation():
    rewards = [1.0, 0.0, 0.5, 2.0]
    result = advantages(rewards)
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    assert result.values == pytest.approx([(r - mean) / std for r in rewards], abs=1e-12)
    assert sum(result.values) == pytest.approx(0, abs=1e-12)
    assert (result.mean, result.std) == pytest.approx((mean, std))
    assert not result.zero_variance


def test_without_normalisation_only_the_mean_is_subtracted():
    assert advantages([1.0, 0.0, 0.0, 0.0], normalise="none").values == (0.75, -0.25, -0.25, -0.25)


@pytest.mark.parametrize("normalise", ["std", "none"])
@pytest.mark.parametrize(
    "rewards",
    [
        [0.7],
        [0.0] * 8,
        [0.35] * 8,
        [-1.0] * 3,
        # 0.1 + 0.2 differs from 0.3 in the last place; a float32 sum in the last place of float32.
        [0.1 + 0.2] * 7 + [0.3],
        [0.35] * 7 + [0.3499999940395355],
        [1e6] * 3 + [1e6 + 0.0625],
    ],
)
def test_equal_rewards_and_float_residue_have_advantage_exactly_zero(rewards, normalise):
    result = advantages(rewards, normalise=normalise)
    assert result.values == (0.0,) * len(rewards)
    assert result.zero_variance


def test_seven_equal_rewards_and_one_other_are_finite_and_bounded():
    result = advantages([0.35] * 7 + [1.0])
    # One sample against seven equal ones: sqrt(7) and -1/sqrt(7), whatever the rewards are.
    assert result.values == pytest.approx([-1 / math.sqrt(7)] * 7 + [math.sqrt(7)], rel=1e-12)


def test_small_but_real_differences_are_kept():
    assert not advantages([1e-9, 2e-9]).zero_variance
    assert not advantages([1.0, 1.0 + 1e-4]).zero_variance


def test_excluded_samples_change_nothing():
    result = group_advantages([1.0, -500.0, 0.0, math.nan], [True, False, True, False])
    assert result.values == (1.0, 0.0, -1.0, 0.0)
    assert result.included == (True, False, True, False)


def test_one_or_no_included_sample_carries_no_signal():
    one = group_advantages([1.0, 0.0, 0.0], [True, False, False])
    assert one.values == (0.0, 0.0, 0.0)
    assert one.zero_variance
    none = group_advantages([1.0, 0.0], [False, False])
    assert none.values == (0.0, 0.0)
    assert none.zero_variance


def test_an_included_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="rewards must be finite"):
        advantages([1.0, math.inf])


def test_overlong_penalty_falls_linearly_inside_the_buffer():
    assert [overlong_penalty(n, 100, 20) for n in (1, 80, 85, 90, 100)] == [0.0, 0.0, -0.25, -0.5, -1.0]
    assert overlong_penalty(100, 100, 0) == 0.0
