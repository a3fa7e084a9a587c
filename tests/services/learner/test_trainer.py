from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from pydantic import ValidationError

from services.learner import trainer as trainer_module
from services.learner.trainer import StepInterrupted, Trainer
from specroll_core.contracts import FinishReason, RewardStatus, VersionSpan
from tests.services.learner.samples import (
    capture_gradient,
    make_config,
    make_group,
    make_trajectory,
    random_groups,
)
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


def double_trainer(config, model_dir):
    """Its model computes in float64: in float32 another packing rounds sums of 1.5 differently, by 2e-6."""
    trainer = Trainer(config, model_dir)
    trainer.policy.model.double()
    return trainer


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.policy.model.named_parameters()}


def equal(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


def group_of(rewards, name="g", **fields):
    return make_group(
        name, [make_trajectory(name, i, [5, 6, 7], [8 + i, 20, 2], reward=r, **fields) for i, r in enumerate(rewards)]
    )


@pytest.mark.parametrize("rewards", [[1.0], [0.0] * 4, [0.35] * 7 + [0.3499999940395355]])
def test_a_batch_without_signal_changes_no_weight(rewards, model_dir):
    trainer = Trainer(make_config(), model_dir)
    before = weights(trainer)
    metrics = trainer.step([group_of(rewards)])
    assert equal(before, weights(trainer))
    assert metrics["zero_std/frac"] == 1.0
    assert all(math.isfinite(v) for v in metrics.values())
    assert "ratio/mean" not in metrics
    assert trainer.version == 1


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_groups_without_signal_leave_loss_and_denominator(beta, model_dir, monkeypatch):
    signal, flat = random_groups(1, count=2), group_of([1.0] * 4, "flat")
    results = []
    for groups in (signal, [signal[0], flat, signal[1]]):
        trainer = double_trainer(make_config(learner={"loss": {"beta": beta}}), model_dir)
        gradient = capture_gradient(trainer, monkeypatch)
        results.append((trainer.step(groups), gradient))
    (alone, a), (mixed, b) = results
    assert mixed["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    assert all(torch.allclose(a[n], b[n], atol=1e-6) for n in a)
    assert (alone["zero_std/frac"], mixed["zero_std/frac"]) == (0.0, pytest.approx(1 / 3))


def test_samples_without_a_verdict_or_aborted_are_left_out(model_dir, monkeypatch):
    group = random_groups(1, count=1, size=3)[0]
    failed = make_trajectory(group.group_id, 3, group.trajectories[0].prompt_ids, [9, 9], reward=0.0)
    extra = (
        dataclasses.replace(failed, reward_status=RewardStatus.ERROR, reward=math.nan),
        dataclasses.replace(failed, reward_status=RewardStatus.TIMEOUT, reward=-7.0),
        dataclasses.replace(failed, finish_reason=FinishReason.ABORT),
    )
    results = []
    for trajectories in (group.trajectories, group.trajectories + extra):
        trainer = double_trainer(make_config(), model_dir)
        gradient = capture_gradient(trainer, monkeypatch)
        results.append((trainer.step([make_group(group.group_id, trajectories)]), gradient))
    (alone, a), (mixed, b) = results
    assert all(torch.allclose(a[n], b[n], atol=1e-6) for n in a)
    assert mixed["reward/mean"] == alone["reward/mean"]
    assert (mixed["excluded/reward"], mixed["excluded/aborted"], mixed["batch/samples"]) == (2, 1, 6)


def test_a_token_of_probability_zero_leaves_the_step(model_dir, monkeypatch):
    """A stop token that was appended and never sampled has behaviour log-probability -inf."""
    group = random_groups(1, count=1, size=3)[0]
    with_stop = tuple(
        dataclasses.replace(
            t,
            token_ids=(*t.token_ids, 2),
            logprobs=(*t.logprobs, -math.inf),
            policy_version_spans=(VersionSpan(0, 0, len(t.token_ids) + 1),),
        )
        for t in group.trajectories
    )
    results = []
    for trajectories in (group.trajectories, with_stop):
        trainer = double_trainer(make_config(), model_dir)
        gradient = capture_gradient(trainer, monkeypatch)
        results.append((trainer.step([make_group(group.group_id, trajectories)]), gradient))
    (alone, a), (stopped, b) = results
    assert stopped["excluded/nonfinite_tokens"] == 3
    assert stopped["tokens"] == alone["tokens"]
    assert stopped["loss"] == pytest.approx(alone["loss"], abs=1e-6)
    assert all(torch.allclose(a[n], b[n], atol=1e-6) for n in a)


def test_tokens_outside_of_the_present_nucleus_are_counted(model_dir):
    trainer = Trainer(make_config(sampling={"top_p": 0.1, "max_new_tokens": 8}), model_dir)
    metrics = trainer.step(random_groups(0))
    assert metrics["excluded/nonfinite_tokens"] > 0
    assert metrics["tokens"] + metrics["excluded/nonfinite_tokens"] == metrics["batch/tokens"]
    assert all(math.isfinite(v) for v in metrics.values())


def test_staleness_and_mismatch_are_told_apart_by_version(model_dir):
    trainer = Trainer(make_config(), model_dir)
    trainer.version = 3
    old = make_trajectory("g", 0, [5, 6], [8, 9, 2], reward=1.0, version=1)
    mixed = make_trajectory("g", 1, [5, 6], [8, 9, 2], reward=0.0)
    mixed = dataclasses.replace(mixed, policy_version_spans=(VersionSpan(2, 0, 1), VersionSpan(3, 1, 3)))
    metrics = trainer.step([make_group("g", [old, mixed])])
    assert metrics["off_policy/staleness/mean"] == 1.5
    assert metrics["off_policy/staleness/max"] == 2
    with torch.no_grad():
        logits = Trainer(make_config(), model_dir).policy.model(torch.tensor([[5, 6, 8, 9, 2]])).logits[0]
    laws = torch.log_softmax(logits, -1)
    k3 = [math.exp(d) - 1 - d for d in (float(laws[1 + i, t]) + 3.0 for i, t in enumerate([8, 9, 2]))]
    assert metrics["mismatch_kl"] == pytest.approx(sum(k3) / 3, rel=1e-4)
    assert metrics["mismatch_kl/equal_version"] == pytest.approx(sum(k3[1:]) / 2, rel=1e-4)


def test_later_minibatches_are_measured_against_the_policy_before_the_step(model_dir):
    groups = random_groups(5, count=4)
    one = Trainer(make_config(learner={"learning_rate": 1e-2}), model_dir).step(groups)
    trainer = Trainer(make_config(learner={"minibatches": 2, "learning_rate": 1e-2}), model_dir)
    two = trainer.step(groups)
    assert one["ratio/mean"] == 1.0
    assert two["ratio/mean"] != 1.0
    assert two["mismatch_kl"] == pytest.approx(one["mismatch_kl"], rel=1e-4)
    assert two["tokens"] == one["tokens"]


def test_the_reference_is_the_starting_model(model_dir):
    trainer = Trainer(make_config(learner={"loss": {"beta": 0.1}, "learning_rate": 1e-2}), model_dir)
    groups = random_groups(5)
    assert trainer.step(groups)["reference_kl"] == pytest.approx(0.0, abs=1e-10)
    assert trainer.step(groups)["reference_kl"] > 1e-6


def test_a_step_can_be_stopped_until_it_has_changed_something(model_dir):
    trainer = Trainer(make_config(), model_dir)
    before = weights(trainer)
    answers = iter([False, True])
    with pytest.raises(StepInterrupted):
        trainer.step(random_groups(1), should_stop=lambda: next(answers, True))
    assert equal(before, weights(trainer))
    assert trainer.version == 0
    expected = Trainer(make_config(), model_dir)
    expected.step(random_groups(1))
    trainer.step(random_groups(1))
    assert equal(weights(expected), weights(trainer))


def test_a_step_after_the_first_update_is_finished(model_dir):
    trainer = Trainer(make_config(learner={"minibatches": 3}), model_dir)
    updates = []
    original = trainer.optimizer.step
    trainer.optimizer.step = lambda *a: (updates.append(1), original(*a))[1]
    trainer.step(random_groups(1), should_stop=lambda: bool(updates))
    assert len(updates) == 3


def test_slow_fast_updates_reposition_between_them(model_dir, monkeypatch):
    trainer = Trainer(make_config(learner={"sfpo": {"steps": 3, "alpha": 0.5, "window": 2}}), model_dir)
    start = trainer.optimizer.snapshot()
    original = trainer._update

    def update(*arguments):
        here = trainer.optimizer.snapshot()
        sums = original(*arguments)
        trainer.optimizer.assign([w + 1 for w in here])
        return sums

    monkeypatch.setattr(trainer, "_update", update)
    metrics = trainer.step(random_groups(1))
    assert metrics["sfpo/alpha"] == 0.5
    assert metrics["ratio/mean"] == 1.0
    for before, after in zip(start, trainer.optimizer.snapshot(), strict=True):
        # Three fast updates of 1, half of the way back, one slow update of 1.
        assert torch.allclose(after - before, torch.tensor(2.5), atol=1e-5)


def test_slow_fast_updates_use_the_policy_at_the_start_as_proximal(model_dir, monkeypatch):
    trainer = Trainer(make_config(learner={"sfpo": {"steps": 2}, "learning_rate": 1e-2}), model_dir)
    ratios = []
    original = trainer_module.policy_loss

    def record(inputs, spec, denominator):
        loss, statistics = original(inputs, spec, denominator)
        ratios.append(float(statistics["ratio_sum"] / statistics["tokens"]))
        return loss, statistics

    monkeypatch.setattr(trainer_module, "policy_loss", record)
    trainer.step(random_groups(1, count=1))
    assert len(ratios) == 3
    assert ratios[0] == 1.0
    assert 1.0 not in ratios[1:]


def test_slow_fast_updates_need_a_law_with_an_entropy():
    with pytest.raises(ValidationError, match=r"learner\.sfpo\.steps needs sampling without"):
        make_config(learner={"sfpo": {"steps": 2}}, sampling={"top_p": 0.9, "max_new_tokens": 8})
    with pytest.raises(ValidationError, match=r"needs learner\.minibatches = 1"):
        make_config(learner={"sfpo": {"steps": 2}, "minibatches": 2})


def test_overlong_answers_lose_reward_under_dapo_only(model_dir, monkeypatch):
    short = make_trajectory("g", 0, [5, 6], [8, 2], reward=1.0)
    long = make_trajectory("g", 1, [5, 6], [8] * 8, reward=1.0)
    for kind, zero in (("dapo", 0.0), ("grpo", 1.0)):
        trainer = Trainer(make_config(learner={"loss": {"kind": kind, "overlong_buffer": 4}}), model_dir)
        metrics = trainer.step([make_group("g", [short, long])])
        assert metrics["zero_std/frac"] == zero
        assert metrics["reward/mean"] == 1.0
