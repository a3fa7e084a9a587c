import itertools
import math
import random

import pytest
import torch

from specroll_core.grpo import LossInputs, LossSpec, denominator, k3, policy_loss

KINDS = ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
CORRECTIONS = ("decoupled", "tis", "icepop", "none")
LEVELS = ("token", "sequence")


def make(seed=0, samples=6, longest=7):
    """Ragged samples with ratios on both sides of every bound, as lists of lists."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, longest) for _ in range(samples)]
    draw = lambda spread: [[-rng.random() * spread - 0.05 for _ in range(n)] for n in lengths]  # noqa: E731
    return {
        "current": draw(2.5),
        "proximal": draw(2.5),
        "behaviour": draw(2.5),
        "reference": draw(2.5),
        "advantages": [rng.gauss(0, 1) for _ in lengths],
    }


def tensor(rows, longest=None):
    longest = longest or max(map(len, rows))
    return torch.tensor([r + [0.0] * (longest - len(r)) for r in rows], dtype=torch.float64)


def inputs_of(data, longest=None):
    longest = longest or max(map(len, data["current"]))
    mask = torch.tensor([[t < len(r) for t in range(longest)] for r in data["current"]])
    return LossInputs(
        logprobs=tensor(data["current"], longest).requires_grad_(),
        proximal=tensor(data["proximal"], longest),
        behaviour=tensor(data["behaviour"], longest),
        reference=tensor(data["reference"], longest),
        advantages=torch.tensor(data["advantages"], dtype=torch.float64),
        mask=mask,
    )


def naive(data, spec):
    """Loss and its derivative by each token's log-probability, token by token, in plain Python."""
    clamp = lambda x, low, high: max(low, min(high, x))  # noqa: E731
    sequences = len(data["current"])
    tokens = sum(map(len, data["current"]))
    total, gradient = 0.0, []
    for s in range(sequences):
        current, proximal, behaviour = data["current"][s], data["proximal"][s], data["behaviour"][s]
        n, a = len(current), data["advantages"][s]
        log_r = [c - p for c, p in zip(current, proximal, strict=True)]
        log_w = [p - b for p, b in zip(proximal, behaviour, strict=True)]
        row = [0.0] * n
        for t in range(n):
            w = math.exp(sum(log_w) if spec.level == "sequence" else log_w[t])
            if spec.correction == "decoupled":
                w = min(w, spec.cap or 5.0)
            elif spec.correction == "tis":
                w = min(w, spec.cap or 2.0)
            elif spec.correction == "icepop":
                w = w if spec.band[0] <= w <= spec.band[1] else 0.0
            else:
                w = 1.0
            r = math.exp(sum(log_r) / n if spec.kind == "gspo" else log_r[t])
            clipped = clamp(r, 1 - spec.clip_low, 1 + spec.clip_high)
            share = {"gspo": 1 / (n * sequences), "dr_grpo": 1 / (sequences * spec.max_new_tokens)}.get(
                spec.kind, 1 / tokens
            )
            if spec.kind == "cispo":
                total += -w * clipped * a * current[t] * share
                row[t] += -w * clipped * a * share
            else:
                total += -w * min(r * a, clipped * a) * share
                slope = a * r if r * a <= clipped * a else 0.0
                if spec.kind == "gspo":
                    for other in range(n):
                        row[other] += -w * slope / n * share
                else:
                    row[t] += -w * slope * share
            d = data["reference"][s][t] - current[t]
            total += spec.beta * (math.exp(d) - 1 - d) * share
            row[t] += spec.beta * (1 - math.exp(d)) * share
        gradient.append(row)
    return total, gradient


@pytest.mark.parametrize(("kind", "correction", "level"), list(itertools.product(KINDS, CORRECTIONS, LEVELS)))
def test_loss_and_gradient_are_the_naive_ones(kind, correction, level):
    spec = LossSpec(kind=kind, correction=correction, level=level, beta=0.03, max_new_tokens=11)
    for seed in range(3):
        data = make(seed)
        inputs = inputs_of(data)
        loss, _ = policy_loss(inputs, spec, denominator(inputs.mask, spec))
        loss.backward()
        expected, gradient = naive(data, spec)
        assert loss.item() == pytest.approx(expected, abs=1e-12)
        assert torch.allclose(inputs.logprobs.grad, tensor(gradient), atol=1e-12)


@pytest.mark.parametrize(("kind", "level"), list(itertools.product(KINDS, LEVELS)))
def test_micro_batches_padding_and_order_change_nothing(kind, level):
    spec = LossSpec(kind=kind, level=level, beta=0.01, max_new_tokens=9)
    data = make(5, samples=8)
    whole = inputs_of(data)
    total = denominator(whole.mask, spec)
    loss, statistics = policy_loss(whole, spec, total)
    loss.backward()
    order = random.Random(1).sample(range(8), 8)
    for size in (1, 2, 8):
        losses, gradients, sums = 0.0, {}, {}
        for start in range(0, 8, size):
            chosen = order[start : start + size]
            part = inputs_of({name: [rows[i] for i in chosen] for name, rows in data.items()}, longest=13)
            piece, stats = policy_loss(part, spec, total)
            piece.backward()
            losses += piece.item()
            gradients |= {i: part.logprobs.grad[row] for row, i in enumerate(chosen)}
            sums = {k: sums.get(k, 0.0) + float(v) for k, v in stats.items()}
        assert losses == pytest.approx(loss.item(), abs=1e-12)
        width = whole.mask.shape[1]
        assert torch.allclose(torch.stack([gradients[i][:width] for i in range(8)]), whole.logprobs.grad, atol=1e-12)
        assert sums == pytest.approx({k: float(v) for k, v in statistics.items()}, abs=1e-9)


def test_statistics_are_counts_and_sums_over_the_tokens():
    data = make(2)
    spec = LossSpec(correction="tis")
    inputs = inputs_of(data)
    on_version = torch.zeros_like(inputs.mask)
    on_version[0] = True
    inputs = LossInputs(**{f: getattr(inputs, f) for f in inputs.__slots__} | {"on_version": on_version})
    _, stats = policy_loss(inputs, spec, denominator(inputs.mask, spec))
    flat = [
        (math.exp(c - p), p - b, data["advantages"][s], s)
        for s in range(6)
        for c, p, b in zip(data["current"][s], data["proximal"][s], data["behaviour"][s], strict=True)
    ]
    mismatch = [math.exp(d) - 1 - d for _, d, _, _ in flat]
    assert stats["tokens"] == len(flat)
    assert float(stats["ratio_sum"]) == pytest.approx(sum(r for r, *_ in flat))
    assert stats["clipped_low"] == sum(r < 0.8 and a < 0 for r, _, a, _ in flat)
    assert stats["clipped_high"] == sum(r > 1.28 and a > 0 for r, _, a, _ in flat)
    assert stats["weight_bounded"] == sum(math.exp(d) > 2 for _, d, _, _ in flat)
    assert float(stats["mismatch_kl_sum"]) == pytest.approx(sum(mismatch))
    assert float(stats["on_version_mismatch_kl_sum"]) == pytest.approx(
        sum(m for m, (*_, s) in zip(mismatch, flat, strict=True) if s == 0)
    )
    assert stats["on_version_tokens"] == len(data["current"][0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["logprobs", "behaviour", "proximal"])
@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_token_whose_logprob_is_not_finite_leaves_loss_and_denominator(kind, where, value):
    spec = LossSpec(kind=kind, max_new_tokens=10)
    data = make(3)
    sample = max(range(6), key=lambda s: len(data["current"][s]))
    inputs = inputs_of(data)
    broken = getattr(inputs, where).detach().clone()
    last = len(data["current"][sample]) - 1
    broken[sample, last] = value
    if where == "logprobs":
        broken.requires_grad_()
    inputs = LossInputs(**{f: getattr(inputs, f) for f in inputs.__slots__} | {where: broken})
    expected = denominator(inputs.mask, spec)
    loss, stats = policy_loss(inputs, spec, expected)
    loss.backward()
    without = {
        name: [row[:last] if s == sample and name != "advantages" else row for s, row in enumerate(rows)]
        for name, rows in data.items()
    }
    naive_loss, gradient = naive(without, spec)
    scale = expected / float(stats["denominator"])
    assert stats["nonfinite"] == 1
    assert loss.item() * scale == pytest.approx(naive_loss, abs=1e-12)
    assert torch.allclose(inputs.logprobs.grad * scale, tensor(gradient, inputs.mask.shape[1]), atol=1e-12)


def test_a_batch_without_any_finite_token_has_loss_zero_and_no_gradient():
    data = make(1)
    inputs = inputs_of(data)
    broken = torch.full_like(inputs.logprobs.detach(), -math.inf).requires_grad_()
    inputs = LossInputs(**{f: getattr(inputs, f) for f in inputs.__slots__} | {"logprobs": broken})
    loss, stats = policy_loss(inputs, LossSpec(), 10.0)
    loss.backward()
    assert loss.item() == 0.0
    assert stats["denominator"] == 0
    assert not broken.grad.any()


def test_extreme_ratios_stay_finite():
    inputs = LossInputs(
        logprobs=torch.tensor([[-0.1, -300.0]], requires_grad=True),
        proximal=torch.tensor([[-300.0, -0.1]]),
        behaviour=torch.tensor([[-0.1, -300.0]]),
        advantages=torch.tensor([-1.0]),
        mask=torch.ones(1, 2, dtype=torch.bool),
    )
    loss, stats = policy_loss(inputs, LossSpec(correction="none"), 2.0)
    loss.backward()
    assert loss.isfinite()
    assert inputs.logprobs.grad.isfinite().all()
    assert all(v.isfinite() for v in stats.values())
    assert float(stats["ratio_sum"]) == pytest.approx(math.exp(20) + math.exp(-20), rel=1e-6)


def test_without_a_proximal_policy_the_ratio_is_exactly_one():
    data = make(4)
    whole = inputs_of(data)
    inputs = LossInputs(whole.logprobs, whole.behaviour, whole.advantages, whole.mask)
    _, stats = policy_loss(inputs, LossSpec(), 1.0)
    assert stats["ratio_sum"] == stats["tokens"]
    assert stats["clipped_low"] == stats["clipped_high"] == 0


def test_k3_is_the_kl_in_expectation():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    expected = float((p * (p / q).log()).sum())
    assert float((p * k3((q / p).log())).sum()) == pytest.approx(expected, abs=1e-12)
