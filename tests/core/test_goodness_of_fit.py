"""The statistics against closed forms, and their false-alarm rates against simulation."""

from __future__ import annotations

import math

import pytest
import torch

from specroll_core.goodness_of_fit import chi_square_p, holm_rejects, normal_quantile, two_sided_p, wealth_p


def test_chi_square_has_its_closed_form_with_two_degrees_of_freedom() -> None:
    law = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    counts = torch.tensor([60, 20, 20])
    statistic = 10**2 / 50 + 5**2 / 25 + 5**2 / 25
    assert chi_square_p(counts, law) == pytest.approx(math.exp(-statistic / 2))


def test_rare_cells_are_counted_as_one() -> None:
    law = torch.tensor([0.5, 0.4, 0.04, 0.03, 0.03], dtype=torch.float64)
    pooled = torch.tensor([0.5, 0.4, 0.1], dtype=torch.float64)
    counts = torch.tensor([45, 40, 5, 5, 5])
    assert chi_square_p(counts, law) == pytest.approx(chi_square_p(torch.tensor([45, 40, 15]), pooled))


def test_what_the_law_forbids_never_happens() -> None:
    assert chi_square_p(torch.tensor([99, 1]), torch.tensor([1.0, 0.0], dtype=torch.float64)) == 0


@pytest.mark.parametrize("z", [0.0, 1.0, 1.96, -3.0])
def test_normal_tails_and_quantiles_agree(z: float) -> None:
    assert normal_quantile(1 - two_sided_p(z) / 2) == pytest.approx(abs(z), abs=1e-9)


def test_gamblers_are_rarely_rich_at_fair_odds_and_soon_where_they_know_better() -> None:
    """Wealth 1 / alpha is reached with a probability of at most alpha."""
    g = torch.Generator().manual_seed(0)
    p = torch.tensor([0.7, 0.29, 0.01], dtype=torch.float64)
    q = torch.tensor([0.1, 0.1, 0.8], dtype=torch.float64)
    shares = torch.tensor([0.01, 0.05], dtype=torch.float64)

    def p_values(law: torch.Tensor) -> list[float]:
        draws = torch.multinomial(law, 500 * 1000, replacement=True, generator=g).view(500, 1000)
        wealth = (shares * ((q / p)[draws][..., None] - 1)).log1p().sum(1)
        return [wealth_p(row) for row in wealth]

    fair = torch.tensor(p_values(p))
    for alpha in (0.5, 0.1, 0.02):
        assert float((fair <= alpha).float().mean()) <= alpha + 3 * math.sqrt(alpha / 500)
    mixed = torch.tensor(p_values(0.95 * p + 0.05 * q))
    assert float((mixed <= 0.001).float().mean()) > 0.95


def test_holm_steps_down() -> None:
    assert holm_rejects([0.04, 0.0001, 0.012], 0.05) == [1, 2, 0]
    assert holm_rejects([0.04, 0.02, 0.03], 0.05) == []
