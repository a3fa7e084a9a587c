"""Tests of whether samples follow a known law, each with a false-alarm rate that is known beforehand.

Two kinds. Pearson's chi-square compares frequencies at one fixed law. The others follow a *sequence* of draws whose
law changes with what was drawn before, as in decoding: given the past, a statistic f of the next token has mean E f
and variance Var f under the exact law, so

- `sum (f - E f) / sqrt(sum Var f)` is standard normal for long sequences (martingale central limit theorem), and
- `prod (1 + eps (q / p - 1))`, the wealth of a gambler who bets on law q against p at fair odds, exceeds 1 / alpha
  with a probability of at most alpha, for any length (Ville's inequality; testing by betting, arXiv 1903.06991).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Pearson's approximation holds where cells are expected at least this often.
_LEAST_EXPECTED = 5


def chi_square_p(counts: Tensor, law: Tensor) -> float:
    """p-value of Pearson's test; cells expected fewer than five times are counted as one.

    counts: [n] int64; law: [n] float64, summing to 1. A cell outside the support that occurs at all gives 0.
    """
    if bool(((law == 0) & (counts > 0)).any()):
        return 0.0
    expected = law * counts.sum()
    rare = expected < _LEAST_EXPECTED
    observed = torch.cat([counts[~rare].double(), counts[rare].sum().double()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 1e-9], expected[expected > 1e-9]
    if expected.numel() < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((expected.numel() - 1) / 2, dtype=torch.float64), statistic / 2))


def two_sided_p(z: float) -> float:
    """P(|Z| >= |z|) of a standard normal Z."""
    return math.erfc(abs(z) / math.sqrt(2))


def normal_quantile(p: float) -> float:
    """z with P(Z <= z) = p."""
    return float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64)))


def wealth_p(log_wealth: Tensor) -> float:
    """p-value of gamblers who start with equal shares of 1: 1 / (their total wealth), at most 1.

    log_wealth: [n] float64, the logarithm of each one's growth.
    """
    log_total = torch.logsumexp(log_wealth.double().flatten(), 0) - math.log(log_wealth.numel())
    return math.exp(-max(0.0, float(log_total)))


def holm_rejects(p_values: Sequence[float], family: float) -> list[int]:
    """Indices that Holm's procedure rejects at the family-wise level."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    rejected: list[int] = []
    for rank, i in enumerate(order):
        if p_values[i] > family / (len(p_values) - rank):
            break
        rejected.append(i)
    return rejected
