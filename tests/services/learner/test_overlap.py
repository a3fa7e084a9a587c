"""Overlap and intervals against counting on a grid, and the report's interval against an exact inversion."""

import random

import pytest

from services.learner.evaluation import wilson_interval
from services.learner.overlap import Interval, Overlap, intersection, length, union
from tests.services.learner.samples import simple_group


def on_grid(intervals: list[Interval]) -> set[int]:
    """Unit cells covered by intervals with whole ends."""
    return {cell for a, b in intervals for cell in range(int(a), int(b))}


@pytest.mark.parametrize("seed", range(20))
def test_union_and_intersection_count_cells(seed: int) -> None:
    rng = random.Random(seed)

    def some() -> list[Interval]:
        starts = [rng.randint(0, 60) for _ in range(rng.randint(0, 8))]
        return [(float(a), float(a + rng.randint(0, 15))) for a in starts]

    left, right = some(), some()
    assert length(union(left)) == len(on_grid(left))
    assert length(intersection(union(left), union(right))) == len(on_grid(left) & on_grid(right))


def test_overlap_of_a_known_schedule() -> None:
    overlap = Overlap()
    # Sampled from 0 to 10 and trained from 10 to 14, while the next group is sampled from 8 to 13.
    overlap.add([simple_group("0", started_at=0.0, finished_at=10.0)], 10.0, 14.0)
    overlap.add([simple_group("1", started_at=8.0, finished_at=13.0)], 14.0, 16.0)
    assert overlap.summary() == {"generation_seconds": 13.0, "training_seconds": 6.0, "overlapped_seconds": 3.0}


@pytest.mark.parametrize(("rate", "n"), [(0.0, 10), (0.16, 200), (0.5, 7), (0.95, 200), (1.0, 50)])
def test_the_interval_inverts_the_normal_test(rate: float, n: int) -> None:
    """Wilson's bounds are the p for which |rate - p| is exactly z standard errors *at p*."""
    for bound in wilson_interval(rate, n):
        if 1e-9 < bound < 1 - 1e-9:  # at 0 and 1 the rate itself is the bound
            assert abs(rate - bound) / (bound * (1 - bound) / n) ** 0.5 == pytest.approx(1.959964, rel=1e-6)
