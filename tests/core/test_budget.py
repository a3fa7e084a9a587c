from __future__ import annotations

import itertools

import pytest

from specroll_core.budget import BUDGETS, AcceptanceModel, BudgetPolicy, prior_budget
from specroll_core.cost import StepTimeModel, bucket_of


def test_step_time_is_the_median_per_bucket_and_never_falls() -> None:
    model = StepTimeModel(window=5)
    for seconds in (0.010, 0.011, 0.900, 0.012, 0.010):
        model.record(8, seconds)
    assert model.predict(8) == 0.011
    model.record(32, 0.009)  # noise: more tokens are not cheaper
    assert model.predict(32) == 0.011
    model.record(128, 0.043)
    assert model.predict(64) == pytest.approx((0.011 + 0.043) / 2)
    assert model.predict(256) == pytest.approx(0.086)
    assert model.predict(1) == 0.011


def test_old_measurements_leave_the_window() -> None:
    model = StepTimeModel(window=3)
    for seconds in (1.0, 1.0, 1.0, 0.1, 0.1):
        model.record(4, seconds)
    assert model.predict(4) == 0.1


def test_measurements_that_are_no_times_are_left_out() -> None:
    model = StepTimeModel()
    for bad in (float("nan"), float("inf"), 0.0, -1.0):
        model.record(4, bad)
    assert not model.known


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 0), (2, 1), (3, 2), (11, 3), (12, 4), (64, 6)])
def test_buckets(tokens: int, bucket: int) -> None:
    assert bucket_of(tokens) == bucket


@pytest.mark.parametrize(("batch", "peak", "nodes"), [(1, 512, 24), (32, 512, 16), (600, 512, 1), (100, 512, 4)])
def test_prior(batch: int, peak: int, nodes: int) -> None:
    assert prior_budget(batch, peak) == nodes


def test_acceptance_curve_is_the_sum_of_the_best_path_scores() -> None:
    model = AcceptanceModel()
    for _ in range(50):
        model.observe([[0.2, 0.5, 0.1]], [2])
        model.observe([[0.2, 0.5, 0.1]], [1])
    # Predicted 0.8, observed about 0.5: the curve is scaled by their ratio.
    ratio = (model.expected(4) - 1) / 0.8
    assert 0.55 < ratio < 0.7
    assert model.expected(2) - 1 == pytest.approx(0.5 * ratio)
    assert model.expected(3) - 1 == pytest.approx(0.7 * ratio)
    curve = [model.expected(n) for n in range(1, 25)]
    assert curve[0] == 1
    assert curve == sorted(curve)


def policy_with(times: dict[int, float], scores: list[float], accepted: float, epsilon: float = 0.0) -> BudgetPolicy:
    """times: of a round by its tokens, whatever requests and nodes they belong to."""
    policy = BudgetPolicy(epsilon=epsilon)
    for tokens, seconds in times.items():
        for nodes in (n for n in BUDGETS if tokens % n == 0):
            for _ in range(4):
                policy.times.record(tokens // nodes, nodes, seconds)
    rounds = 100
    for i in range(rounds):
        policy.acceptance.observe([scores], [1 + int((i + 1) * accepted) - int(i * accepted)])
    return policy


def test_small_batches_speculate_and_large_ones_do_not() -> None:
    # Memory-bound up to 32 tokens, compute-bound beyond.
    times = {2**i: max(1.0, 2**i / 32) for i in range(11)}
    policy = policy_with(times, [0.5 * 0.8**i for i in range(23)], accepted=2.0)
    assert policy.choose(1) == 24
    assert policy.choose(4) in (6, 8)
    assert policy.choose(64) == 1


def test_speculation_needs_a_gain_and_leaves_with_hysteresis() -> None:
    times = {1: 1.0, 2: 1.3}
    policy = policy_with({**times, 4: 10.0}, [0.34], accepted=0.34)
    assert policy.gain(1, 2) == pytest.approx(1.34 / 1.3, abs=0.02)  # 3 %: not enough to start
    assert policy.choose(1) == 1
    policy._current[1] = 2
    assert policy.choose(1) == 2  # but enough to stay
    for _ in range(300):
        policy.times.record(1, 2, 1.5)
    assert policy.choose(1) == 1


def test_an_unmeasured_plain_step_is_measured_first() -> None:
    policy = policy_with({8: 1.0}, [0.9], accepted=0.9)
    assert policy.choose(1) == 1


def test_the_choice_is_deterministic_given_a_seed() -> None:
    def run() -> list[int]:
        policy = policy_with({2**i: 1.0 + 0.01 * 2**i for i in range(6)}, [0.4, 0.2], accepted=0.6, epsilon=0.5)
        out = []
        for _ in range(60):
            n = policy.choose(2)
            policy.record(2, n, 1.0 + 0.01 * 2 * n)
            out.append(n)
        return out

    assert run() == run()


def test_exploring_costs_little_even_where_speculation_is_ruinous() -> None:
    """Every extra node costs as much as a plain step and nothing is ever accepted."""
    policy = policy_with({1: 1.0}, [0.01], accepted=0.0, epsilon=0.1)
    spent = 0.0
    for _ in range(5_000):
        n = policy.choose(4)
        assert n in BUDGETS
        policy.record(4, n, float(n))
        if n > 1:
            policy.acceptance.observe([[0.01] * (n - 1)] * 4, [1] * 4)
        spent += n
    assert spent / 5_000 < 1.02


@pytest.mark.parametrize("apart", [True, False])
def test_what_is_paid_once_does_not_hide_what_a_step_costs(apart: bool) -> None:
    """Two nodes give 1.5 tokens in 1.2 steps; after a plain step, drafting pays three more steps to begin with."""
    policy = policy_with({}, [0.5], accepted=0.5, epsilon=0.1)
    drafting, last, drafted = 0, 1, 0
    for step in range(20_000):
        n = policy.choose(4)
        once = 3.0 if n > 1 and last == 1 else 0.0
        seconds = {1: 1.0, 2: 1.2}.get(n, 5.0)
        policy.record(4, n, seconds if apart else seconds + once, once if apart else 0.0)
        drafted += n == 2
        drafting += n == 2 and step >= 10_000
        last = n
    if apart:
        assert drafting > 9_000
    else:
        assert drafted < 1_000


@pytest.mark.parametrize("budgets", [(), (2, 4), (1, 4, 2), (1, 1, 2)])
def test_budgets_are_checked(budgets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="budgets"):
        BudgetPolicy(budgets)


TIMES = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 6: 1.5, 8: 1.7, 12: 2.1, 16: 2.5, 24: 3.3}
RICH, POOR = [0.9**i for i in range(1, 24)], [0.3 * 0.3**i for i in range(23)]


def test_rounds_get_what_pays_in_the_long_run() -> None:
    """Against every way of giving one size to rich rounds and one to poor ones, one rich round in four."""

    def tokens(scores: list[float], n: int) -> float:
        return 1 + sum(scores[: n - 1])

    def rate(rich: int, poor: int) -> float:
        given = 0.25 * tokens(RICH, rich) + 0.75 * tokens(POOR, poor)
        return given / (0.25 * TIMES[rich] + 0.75 * TIMES[poor])

    sizes = [n for n in BUDGETS if n > 1]
    best = max(rate(*pair) for pair in itertools.product(sizes, repeat=2))
    assert best > 1.05 * max(rate(n, n) for n in sizes)
    policy = BudgetPolicy(epsilon=0.0)
    for nodes, seconds in TIMES.items():
        policy.times.record(1, nodes, seconds)
    given = taken = 0.0
    for turn in range(4_000):
        scores = RICH if turn % 4 == 0 else POOR
        n = policy.fit(1, [scores])
        policy.acceptance.observe([scores], [1], 0)  # nothing verified beside the root: no correction to learn
        if turn >= 1_000:
            given += tokens(scores, n)
            taken += TIMES[n]
    assert given / taken == pytest.approx(best, rel=0.002)


def test_a_round_of_several_requests_counts_all_of_them() -> None:
    policy = BudgetPolicy(epsilon=0.0)
    for nodes, seconds in TIMES.items():
        policy.times.record(3, nodes, seconds)
    rich_and_poor, rate = [RICH, POOR, POOR], 0.0
    for _ in range(3):  # with the rate of such rounds alone, the best single ratio
        n = policy.fit(3, rich_and_poor)
    for n_other in (m for m in BUDGETS if m > 1):
        rate = max(rate, sum(1 + sum(s[: n_other - 1]) for s in rich_and_poor) / TIMES[n_other])
    assert sum(1 + sum(s[: n - 1]) for s in rich_and_poor) / TIMES[n] == pytest.approx(rate)


def test_a_round_verifies_no_more_than_was_found_and_keeps_to_the_budgets() -> None:
    policy = BudgetPolicy((1, 4, 16), epsilon=0.0)
    for nodes in (1, 4, 16):
        policy.times.record(2, nodes, 1.0)  # time is no reason to stop
    assert policy.fit(2, [[], []]) == 1
    assert policy.fit(2, [[0.5], []]) == 4
    assert policy.fit(2, [[0.5] * 3, [0.2]]) == 4
    assert policy.fit(2, [[0.5] * 4, []]) == 16
    assert policy.fit(2, [[0.5] * 20, []]) == 16


def test_trees_are_grown_further_than_is_best_on_average() -> None:
    policy = BudgetPolicy(epsilon=0.0)
    assert [policy.reach(n) for n in (1, 2, 8, 16, 24)] == [1, 4, 16, 24, 24]


def test_acceptance_is_learned_from_all_that_was_grown_and_corrected_by_what_was_verified() -> None:
    model = AcceptanceModel()
    for _ in range(200):
        model.observe([[0.5, 0.25, 0.125]], [2], 2)
    assert model.correction == pytest.approx(1 / 0.75)
    assert model.expected(4) == pytest.approx(1 + 0.875 / 0.75)
