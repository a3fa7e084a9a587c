from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from services.learner.optimizer import MasterAdamW, warmed_up


def make_model(dtype, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def make_optimizer(model, **changes):
    settings = {"betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1e9} | changes
    return MasterAdamW(model.named_parameters(), **settings)


def loss_of(model, seed):
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    return model(inputs.to(next(model.parameters()).dtype)).float().square().sum()


def test_float32_is_plain_adamw_with_decay_on_matrices_only():
    model, twin = make_model(torch.float32), make_model(torch.float32)
    optimizer = make_optimizer(model)
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in twin.parameters() if p.dim() == 2], "weight_decay": 0.1},
            {"params": [p for p in twin.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for step in range(4):
        loss_of(model, step).backward()
        optimizer.step(1e-2)
        plain.zero_grad()
        loss_of(twin, step).backward()
        plain.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_bfloat16_updates_too_small_for_the_model_add_up():
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model, weight_decay=0.0)
    start, rounded = optimizer.snapshot(), [p.detach().clone() for p in model.parameters()]
    for _ in range(50):
        for p in model.parameters():
            (p.float() * 1.0).sum().backward()
        optimizer.step(1e-5)
    for before, after, first, now in zip(start, optimizer.snapshot(), rounded, model.parameters(), strict=True):
        # A constant gradient moves Adam by the learning rate each step.
        assert torch.allclose(before - after, torch.tensor(5e-4), rtol=2e-3)
        assert torch.equal(now, after.to(torch.bfloat16))
        assert now.dtype == first.dtype == torch.bfloat16
    assert any(not torch.equal(a, b) for a, b in zip(rounded, model.parameters(), strict=True))


def test_gradients_of_micro_batches_are_added_in_float32():
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model)
    weight = model[0].bias
    # In bfloat16, 256 + 1 is 256.
    for value in (256.0, 1.0, 1.0, 1.0):
        (weight * value).sum().backward()
        assert weight.grad is None
    norm = optimizer.step(0.0).grad_norm
    assert norm == pytest.approx(259 * math.sqrt(8), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_and_clip_act_on_the_global_norm(dtype):
    results = []
    for scale, limit in ((1.0, 0.25), (8.0, 0.25), (1.0, 1e9)):
        model = make_model(dtype)
        optimizer = make_optimizer(model, max_grad_norm=limit, weight_decay=0.0)
        loss_of(model, 0).backward()
        report = optimizer.step(1e-2, scale)
        moments = [v for k, v in optimizer.tensors().items() if k.startswith("exp_avg/")]
        results.append((report.grad_norm, torch.nn.utils.get_total_norm(moments).item() / 0.1))
    (norm, clipped), (scaled, clipped_again), (free, unclipped) = results
    assert norm == free
    assert scaled == pytest.approx(8 * norm)
    assert clipped == pytest.approx(0.25, rel=1e-5)
    assert clipped_again == pytest.approx(0.25, rel=1e-5)
    assert unclipped == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(dtype):
    model = make_model(dtype)
    optimizer = make_optimizer(model)
    loss_of(model, 0).backward()
    optimizer.step(1e-2)
    before = {k: v.clone() for k, v in optimizer.tensors().items()}
    (loss_of(model, 1) * math.inf).backward()
    report = optimizer.step(1e-2)
    assert not report.applied
    assert optimizer.skipped == 1
    assert all(torch.equal(before[k], v) for k, v in optimizer.tensors().items())
    loss_of(model, 2).backward()
    assert optimizer.step(1e-2).applied


def test_tensors_restore_the_next_step_bitwise():
    def run(optimizer, model, steps):
        for step in steps:
            loss_of(model, step).backward()
            optimizer.step(1e-2)

    model = make_model(torch.float32)
    optimizer = make_optimizer(model)
    run(optimizer, model, [0, 1])
    saved = {k: v.clone() for k, v in optimizer.tensors().items()}
    other = make_model(torch.float32, seed=9)
    restored = make_optimizer(other)
    restored.load_tensors(saved)
    run(optimizer, model, [2, 3])
    run(restored, other, [2, 3])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_tensors_of_another_model_are_refused():
    optimizer = make_optimizer(make_model(torch.float32))
    with pytest.raises(ValueError, match="another model"):
        optimizer.load_tensors({"master/0.weight": torch.zeros(3, 3)})


def test_warm_up_is_linear():
    assert [warmed_up(1.0, step, 3) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert warmed_up(0.5, 0, 0) == 0.5
