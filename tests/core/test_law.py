from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specroll_core import law
from specroll_core.contracts import SamplingParams
from specroll_core.law import (
    LawParams,
    draw_outside,
    final_logprobs,
    final_probs,
    sample,
    sample_and_sum,
    token_logprobs,
)


def naive_law(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The definition in loops over Python floats: probabilities by token."""
    size = len(logits)
    if temperature == 0:
        best = max(range(size), key=lambda v: (logits[v], -v))
        return [1.0 if v == best else 0.0 for v in range(size)]
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    p = [w / sum(weights) for w in weights]
    ranked = sorted(range(size), key=lambda v: (-p[v], v))
    kept, before = [], 0.0
    for rank, v in enumerate(ranked):
        within_k = top_k == -1 or rank < top_k
        if within_k and (top_p == 1 or before <= top_p) and p[v] >= min_p * p[ranked[0]]:
            kept.append(v)
        before += p[v]
    total = sum(p[v] for v in kept)
    return [p[v] / total if v in kept else 0.0 for v in range(size)]


CASES = [
    (1.0, -1, 1.0, 0.0),
    (0.6, -1, 1.0, 0.0),
    (0.0, -1, 1.0, 0.0),
    (1.3, 5, 1.0, 0.0),
    (1.0, -1, 0.8, 0.0),
    (1.0, -1, 1.0, 0.2),
    (0.7, 20, 0.9, 0.05),
    (1.0, 1, 1.0, 0.0),
    (1.0, 10_000, 1.0, 0.0),
]


def mixed(cases: list[tuple[float, int, float, float]]) -> LawParams:
    return LawParams.build(*map(list, zip(*cases, strict=True)))


@pytest.mark.parametrize("vocab", [7, 1000])
def test_rows_of_different_laws_match_the_naive_loop(vocab: int) -> None:
    logits = torch.randn(len(CASES), vocab, generator=torch.Generator().manual_seed(1)) * 2
    expected = torch.tensor([naive_law(row.tolist(), *case) for row, case in zip(logits, CASES, strict=True)])
    got = final_logprobs(logits, mixed(CASES))
    assert torch.equal(got == -math.inf, expected == 0)
    torch.testing.assert_close(got.exp(), expected, atol=1e-6, rtol=1e-4)
    probs = final_probs(logits, mixed(CASES))
    assert torch.equal(probs == 0, expected == 0)
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=1e-4)
    for i, case in enumerate(CASES):  # and no row depends on the others
        torch.testing.assert_close(final_logprobs(logits[i : i + 1], mixed([case])), got[i : i + 1])


@pytest.mark.parametrize("case", [(1.0, 4, 1.0, 0.0), (1.0, -1, 0.6, 0.0), (0.5, 3, 0.99, 0.1), (1.0, -1, 1.0, 0.5)])
def test_ties_at_the_edge_go_to_the_lower_ids(case: tuple[float, int, float, float]) -> None:
    logits = torch.randint(0, 3, (200, 12), generator=torch.Generator().manual_seed(2)).float()
    expected = torch.tensor([naive_law(row.tolist(), *case) for row in logits])
    got = final_logprobs(logits, mixed([case] * 200)).exp()
    # Sums of equal numbers may round either side of top_p: compare where no boundary is within rounding.
    agree = (
        torch.equal(got == 0, expected == 0) if case[2] == 1 else ((got == 0) == (expected == 0)).all(-1).float().mean()
    )
    assert agree > 0.9


def test_a_wide_support_is_found_past_the_first_look() -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(3)) * 0.1
    cases = [(1.0, -1, 0.9, 0.0), (1.0, 3000, 1.0, 0.0), (1.0, -1, 0.5, 0.0)]
    got = final_logprobs(logits, mixed(cases))
    for row, case in enumerate(cases):
        expected = torch.tensor(naive_law(logits[row].tolist(), *case))
        assert int((got[row] > -math.inf).sum()) == pytest.approx(int((expected > 0).sum()), abs=1)
    assert (got > -math.inf).sum(-1).tolist()[1] == 3000


@pytest.mark.parametrize("vocab", [50, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_law_is_that_of_sglangs_sampler(vocab: int, dtype: torch.dtype) -> None:
    sampler = pytest.importorskip("sglang.srt.layers.sampler")
    g = torch.Generator().manual_seed(4)
    rows = 64
    logits = (torch.randn(rows, vocab, generator=g) * 3).to(dtype).float()  # bfloat16 logits tie often
    temperature = (torch.rand(rows, generator=g) * 1.5 + 0.1).tolist()
    top_k = torch.randint(1, 40, (rows,), generator=g).tolist()
    top_p = (torch.rand(rows, generator=g) * 0.6 + 0.39).tolist()
    min_p = (torch.rand(rows, generator=g) * 0.2).tolist()
    params = LawParams.build(temperature, top_k, top_p, min_p)
    _, weights, ids, _ = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        torch.softmax(logits / torch.tensor(temperature)[:, None], dim=-1),
        torch.tensor(top_k),
        torch.tensor(top_p),
        torch.tensor(min_p),
        True,
        None,
        torch.zeros(rows, dtype=torch.int64),
        return_filtered_probs=True,
    )
    expected = torch.zeros(rows, vocab).scatter_(1, ids, weights)
    expected /= expected.sum(-1, keepdim=True)
    got = final_logprobs(logits, params).exp()
    # Its sort is not stable: which of several tokens tied at the edge it keeps is arbitrary, how many is not.
    assert torch.equal((got > 0).sum(-1), (expected > 0).sum(-1))
    edge = torch.where(expected > 0, expected, torch.inf).amin(-1, keepdim=True)
    for kept in (got, expected):
        kept[(kept - edge).abs() <= 1e-5 * edge] = 0
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_token_logprobs_agree_with_the_law_and_its_gradient() -> None:
    logits = torch.randn(len(CASES), 300, generator=torch.Generator().manual_seed(5)) * 2
    params = mixed(CASES)
    full = final_logprobs(logits, params)
    tokens = torch.where(torch.arange(len(CASES)) % 2 == 0, full.argmax(-1), full.argmin(-1))
    a, b = (logits.clone().requires_grad_() for _ in range(2))
    got = token_logprobs(a, tokens, params)
    expected = final_logprobs(b, params).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(got, expected)
    inside = expected > -math.inf
    (got[inside].sum()).backward()
    (expected[inside].sum()).backward()
    assert a.grad is not None
    assert b.grad is not None
    assert bool(torch.isfinite(a.grad).all())
    torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)


def test_requests_become_rows() -> None:
    params = LawParams.from_requests([SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_p=0.9)])
    assert (params.rows, params.needs_filter, params.any_greedy, params.all_greedy) == (3, True, True, False)
    assert not LawParams.build([1.0, 0.0], top_p=[1.0, 0.5]).needs_filter  # a greedy row needs no filter
    assert LawParams.build([0.0, 1.0], top_k=[-1, 1]).all_greedy
    assert not LawParams.build([1.0], top_k=[1 << 30]).needs_filter


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": [-1.0]},
        {"temperature": [math.nan]},
        {"temperature": [1.0], "top_k": [0]},
        {"temperature": [1.0], "top_p": [0.0]},
        {"temperature": [1.0], "min_p": [1.5]},
        {"temperature": [1.0], "top_p": [1.0, 1.0]},
    ],
)
def test_values_outside_their_range_are_refused(bad: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match=next(reversed(bad))):
        LawParams.build(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab", [5, 512, 513, 3000])
def test_sample_inverts_the_cumulative_distribution(vocab: int) -> None:
    g = torch.Generator().manual_seed(6)
    probs = torch.rand(400, vocab, generator=g) ** 8
    probs[:, ::3] = 0
    u = torch.rand(400, generator=g, dtype=torch.float64)
    expected = (probs.double().cumsum(-1) <= (u * probs.double().sum(-1))[:, None]).sum(-1)
    got = sample(probs, u)
    # Block sums in float32 move a boundary by about 1e-7 of the mass: too little to meet any of these draws.
    assert torch.equal(got, expected)


@pytest.mark.parametrize("vocab", [7, 3000])
def test_rows_are_summed_beside_the_draw_and_may_be_empty(vocab: int) -> None:
    probs = torch.rand(5, vocab, generator=torch.Generator().manual_seed(0))
    probs[2] = 0
    uniforms = torch.tensor([0.0, 0.3, 0.999, 0.5, 1 - 2**-53], dtype=torch.float64)
    tokens, sums = sample_and_sum(probs, uniforms)
    expected = [math.fsum(row) for row in probs.tolist()]
    assert sums.tolist() == pytest.approx(expected, rel=1e-6)
    assert sums[2] == 0
    assert bool(((tokens >= 0) & (tokens < vocab)).all())
    kept = [0, 1, 3, 4]
    assert tokens[kept].tolist() == sample(probs[kept], uniforms[kept]).tolist()


@pytest.mark.parametrize("vocab", [6, 1500])
def test_sample_never_returns_a_token_of_probability_zero(vocab: int) -> None:
    uniforms = torch.tensor([0.0, 1e-300, 0.5, 1 - 2**-53, 1 - 2**-24], dtype=torch.float64)
    for support in ([0], [vocab - 1], [2], [1, 4], [0, vocab - 1]):
        for scale in (1.0, 1e-30, 3.0):
            probs = torch.zeros(len(uniforms), vocab)
            probs[:, support] = scale
            got = sample(probs, uniforms)
            assert set(got.tolist()) <= set(support)
            assert int(got[0]) == support[0]
            assert int(got[3]) == support[-1]


@pytest.fixture(params=[True, False], ids=["copied", "in place"])
def _either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short laws on a CPU are copied, others are not."""
    if not request.param:
        monkeypatch.setattr(law, "_COPIED", 0)


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("vocab", [8, 2000])
def test_draws_outside_a_set_follow_the_renormalised_law(vocab: int) -> None:
    g = torch.Generator().manual_seed(7)
    laws = (torch.randn(3, vocab, generator=g) * 3).softmax(-1)
    row = torch.randint(0, 3, (500,), generator=g)
    top = laws.topk(4).indices
    excluded = torch.where(torch.rand(500, 4, generator=g) < 0.7, top[row], -1)
    u = torch.rand(500, generator=g, dtype=torch.float64)
    got, mass = draw_outside(laws, row, excluded, u)
    for i in range(500):
        q: Tensor = laws[row[i]].double().clone()
        q[excluded[i][excluded[i] >= 0]] = 0
        assert float(mass[i]) == pytest.approx(float(q.sum()), rel=1e-5, abs=1e-12)
        assert int(got[i]) == int((q.cumsum(-1) <= u[i] * q.sum()).sum())


@pytest.mark.usefixtures("_either_way")
def test_a_set_that_holds_all_of_the_law_leaves_no_mass() -> None:
    laws = torch.zeros(1, 1000)
    laws[0, [3, 700]] = torch.tensor([0.7, 0.3])
    _, mass = draw_outside(
        laws, torch.tensor([0]), torch.tensor([[3, 700]]), torch.tensor([0.999], dtype=torch.float64)
    )
    assert float(mass) == 0
    laws[0, 701] = 1e-12  # less than rounding beside 0.3, but all that is left
    got, mass = draw_outside(
        laws, torch.tensor([0]), torch.tensor([[3, 700]]), torch.tensor([0.5], dtype=torch.float64)
    )
    assert int(got) == 701
    assert float(mass) == pytest.approx(1e-12)
