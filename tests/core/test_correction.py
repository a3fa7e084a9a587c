"""The correction against its formula, one trajectory, head and token at a time."""

from __future__ import annotations

import pytest
import torch

from specroll_core.correction import CorrectionOptions, FastWeights, Features
from specroll_core.pending import TOP, Matured, PendingProposals, top_tokens
from specroll_core.whitening import Directions, whitened_rows

H, M, X, K = 12, 40, 8, 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Given:
    """Features that are given in place of the states."""

    size = X

    def __call__(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        return h


def all_of(rows: torch.Tensor) -> Directions:
    return Directions.of(rows, torch.arange(len(rows)), len(rows))


def one(x: torch.Tensor, token: int, difference: float, head: int = 0) -> Matured:
    """A proposal that missed a token."""
    none = torch.empty(1, 0)
    return Matured(
        row=torch.tensor([0]),
        heads=torch.tensor([head]),
        memo=x,
        temperature=torch.tensor([1.0]),
        proposed=none.long(),
        q=none,
        target=torch.tensor([[token]]),
        p=torch.tensor([[difference]]),
        candidates=none.long(),
    )


def skewed_rows() -> torch.Tensor:
    """Rows with a large common part and a few strong directions, as LM heads have."""
    g = generator()
    return torch.randn(M, H, generator=g) @ torch.diag(torch.logspace(1, -1, H)) + 5


def test_whitened_rows_follow_the_definition_and_move_one_logit() -> None:
    rows, f = skewed_rows(), torch.rand(M, generator=generator(1))
    got = whitened_rows(rows, f, 0.1)
    w = (f / f.sum()).double()
    m = sum(w[v] * rows[v].double() for v in range(M))
    c = sum(w[v] * torch.outer(rows[v].double() - m, rows[v].double() - m) for v in range(M))
    p = torch.linalg.inv(c + 0.1 * c.trace() / H * torch.eye(H, dtype=torch.float64))
    for v in range(M):
        centred = rows[v].double() - m
        torch.testing.assert_close(got[v].double(), p @ centred / (centred @ p @ centred), rtol=1e-3, atol=1e-5)
    # Relative to the mean logit, a unit step along D_v adds one to v's logit, and less to others than W_v does.
    effect = (rows - m.float()) @ got.T
    torch.testing.assert_close(effect.diagonal(), torch.ones(M), rtol=1e-3, atol=1e-3)
    plain = rows - m.float()
    plain = plain @ (plain / plain.square().sum(-1, keepdim=True)).T
    assert effect.square().mean() < plain.square().mean()


def test_features_are_of_unit_norm_and_balanced() -> None:
    g = generator(2)
    hidden, embedded = torch.randn(200, H, generator=g) * 30 + 7, torch.randn(200, H, generator=g) * 0.02
    features = Features(hidden, embedded, components=4)
    x = features(hidden, embedded)
    assert x.shape == (200, features.size) == (200, 8)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(200))
    assert float(x[:, :4].norm(dim=-1).mean()) == pytest.approx(float(x[:, 4:].norm(dim=-1).mean()), rel=0.1)
    with pytest.raises(ValueError, match="hidden"):
        Features(hidden[:3], embedded[:3], components=4)


def naive(
    rounds: list[tuple[int, torch.Tensor, float, torch.Tensor, torch.Tensor]],
    laws: list[tuple[torch.Tensor, torch.Tensor]],
    directions: torch.Tensor,
) -> torch.Tensor:
    """[K, H, X] after a trajectory. rounds: (start, x, temperature, columns [K, C], q [K, C]); laws by position."""
    weights = torch.zeros(K, H, X)
    for start, x, temperature, columns, q in rounds:
        for k in range(K):
            at = start + k + 1
            if at < len(laws):
                step = torch.zeros(H)
                for v, share in zip(columns[k].tolist(), q[k].tolist(), strict=True):
                    step -= share * directions[v]
                for v, share in zip(laws[at][0].tolist(), laws[at][1].tolist(), strict=True):
                    if v >= 0:
                        step += share * directions[v]
                weights[k] += 3.0 * temperature * torch.outer(step, x)
    return weights


def test_batched_learning_is_the_formula_for_each_trajectory_alone() -> None:
    """Three slots with rounds of different lengths, matured in the order of serving."""
    g = generator(3)
    directions = torch.randn(M, H, generator=g)
    fast, pending = FastWeights(4, K, all_of(directions), Given()), PendingProposals(4, K, X)
    length, slots = 12, [3, 0, 1]
    temperature = {3: 1.0, 0: 0.6, 1: 0.8}
    laws = {
        s: [
            (
                torch.where(torch.rand(TOP, generator=g) < 0.2, -1, torch.randperm(M, generator=g)[:TOP]),
                torch.rand(TOP, generator=g) / TOP,
            )
            for _ in range(length)
        ]
        for s in slots
    }
    rounds: dict[int, list[tuple[int, torch.Tensor, float, torch.Tensor, torch.Tensor]]] = {s: [] for s in slots}
    at = dict.fromkeys(slots, 0)
    while active := [s for s in slots if at[s] < length - 1]:
        index = torch.tensor(active)
        x = torch.nn.functional.normalize(torch.randn(len(active), X, generator=g), dim=-1)
        warm = torch.tensor([temperature[s] for s in active])
        columns, q = top_tokens(torch.randn(len(active), K, M, generator=g), warm)
        pending.push(
            index,
            torch.tensor([at[s] for s in active]),
            x,
            warm,
            columns,
            q,
        )
        for i, s in enumerate(active):
            rounds[s].append((at[s], x[i], temperature[s], columns[i], q[i]))
        where: list[tuple[int, int]] = []
        for s in active:
            step = min(int(torch.randint(1, 5, (1,), generator=g)), length - 1 - at[s])
            where += [(s, at[s] + j + 1) for j in range(step)]
            at[s] += step
        verified = torch.tensor(where)
        matured = pending.mature(
            verified[:, 0],
            verified[:, 1],
            torch.stack([laws[s][j][0] for s, j in where]),
            torch.stack([laws[s][j][1] for s, j in where]),
        )
        fast.learn(verified[matured.row, 0], matured)
    for s in slots:
        torch.testing.assert_close(fast.weights[s], naive(rounds[s], laws[s], directions), rtol=1e-4, atol=1e-5)
    assert fast.weights[2].abs().max() == 0
    fast.reset(0)
    pending.reset(0)
    assert fast.weights[0].abs().max() == 0
    assert pending.mature(torch.tensor([0]), torch.tensor([length]), columns[:1, 0], q[:1, 0]).row.numel() == 0


def test_a_correction_is_bounded_and_raises_what_was_missed() -> None:
    g = generator(4)
    rows = skewed_rows()
    directions = whitened_rows(rows, torch.ones(M))
    fast = FastWeights(2, K, all_of(directions), Given(), CorrectionOptions(bound=0.2))
    z, x = torch.randn(1, K, H, generator=g), torch.nn.functional.normalize(torch.randn(1, X, generator=g), dim=-1)

    def corrected(slot: int) -> torch.Tensor:
        return fast.correct(torch.tensor([slot]), z, x, x)[0]

    assert torch.equal(corrected(1), z)
    fast.learn(torch.tensor([1]), one(x, 7, 0.01))
    before, after = z[0, 0] @ rows.T, corrected(1)[0, 0] @ rows.T
    gained = (after - before) - (after - before).mean()
    assert int(gained.argmax()) == 7
    assert torch.equal(corrected(1)[0, 1:], z[0, 1:])
    move = corrected(1) - z
    fast.halve()
    torch.testing.assert_close(corrected(1) - z, move / 2, atol=1e-5, rtol=1e-3)
    fast.learn(torch.tensor([1]), one(x, 7, 1e6))
    assert float((corrected(1) - z)[0, 0].norm()) == pytest.approx(0.2 * float(z[0, 0].norm()), rel=1e-4)
    assert torch.equal(corrected(0), z)  # the other slot knows nothing of it


def test_tokens_without_a_direction_teach_nothing() -> None:
    some = Directions.of(torch.randn(3, H, generator=generator(5)), torch.tensor([2, 5, 9]), M)
    tokens, weights = torch.tensor([[5, -1, 3, 9], [4, 4, -1, 0]]), torch.rand(2, 4)
    want = weights[0, 0] * some.rows[1] + weights[0, 3] * some.rows[2]
    torch.testing.assert_close(some.combine(tokens, weights), torch.stack([want, torch.zeros(H)]))
    assert some.known(tokens[0]) == 0.5


def test_bytes_are_as_stated_and_settings_are_checked() -> None:
    class Wide(Given):
        size = 64

    fast = FastWeights(64, 3, all_of(torch.zeros(10, 576)), Wide())
    assert fast.bytes == 64 * 3 * 576 * 64 * 4
    assert PendingProposals(64, 3, 64).bytes < 64 * 4096
    with pytest.raises(ValueError, match="rate"):
        CorrectionOptions(rate=0)
