"""A whole step against token-by-token loops over a plain `transformers` model."""

from __future__ import annotations

import itertools
import math
import statistics
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.learner import trainer as trainer_module
from services.learner.trainer import Trainer
from specroll_core.contracts import SamplingParams
from specroll_core.law import LawParams, final_logprobs
from specroll_core.packing import plan
from tests.services.learner.samples import capture_gradient, make_config, random_groups
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=3)


def plain_logprobs(model, prompt, completion, sampling):
    """float32 [len(completion)], from one forward pass of this sequence alone."""
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    law = final_logprobs(logits, LawParams.from_requests([sampling] * len(completion)))
    return law[torch.arange(len(completion)), torch.tensor(completion)]


def naive_loss(model, groups, config):
    """The batch's loss where the proximal policy is the current one, as a differentiable scalar."""
    loss, sampling = config.learner.loss, config.sampling.to_params()
    terms, tokens, sequences = [], 0, 0
    for group in groups:
        rewards = [t.reward for t in group.trajectories]
        mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
        for t in group.trajectories:
            advantage = (t.reward - mean) / (1 if loss.kind == "dr_grpo" else std)
            current = plain_logprobs(model, t.prompt_ids, t.token_ids, sampling)
            n = len(t.token_ids)
            tokens, sequences = tokens + n, sequences + 1
            log_w = [float(c.detach()) - b for c, b in zip(current, t.logprobs, strict=True)]
            for i in range(n):
                w = math.exp(sum(log_w) if loss.level == "sequence" else log_w[i])
                w = {
                    "decoupled": min(w, 5.0),
                    "tis": min(w, 2.0),
                    "icepop": w if 0.5 <= w <= 5.0 else 0.0,
                    "none": 1.0,
                }[loss.correction]
                # At the proximal policy every ratio is 1 and unclipped; only its derivative differs between kinds.
                if loss.kind == "gspo":
                    ratio = ((current - current.detach()).sum() / n).exp()
                    terms.append((-w * ratio * advantage / n, 1))
                elif loss.kind == "cispo":
                    terms.append((-w * advantage * current[i], 0))
                else:
                    terms.append((-w * (current[i] - current[i].detach()).exp() * advantage, 0))
    divisor = {"gspo": sequences, "dr_grpo": sequences * config.sampling.max_new_tokens}.get(loss.kind, tokens)
    return sum(term for term, _ in terms) / divisor


def step_gradient(config, model_dir, groups, monkeypatch):
    trainer = Trainer(config, model_dir)
    gradient = capture_gradient(trainer, monkeypatch)
    return trainer.step(groups), gradient


def assert_close(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=tolerance, rtol=1e-4), name


KINDS = ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
CHOICES = list(itertools.product(KINDS, ("decoupled", "tis", "icepop", "none"), ("token", "sequence")))


@pytest.mark.parametrize(("kind", "correction", "level"), CHOICES)
def test_loss_and_gradient_of_a_step(kind, correction, level, model_dir, monkeypatch):
    loss = {"kind": kind, "correction": correction, "level": level}
    config = make_config(learner={"loss": loss}, sampling={"max_new_tokens": 8, "temperature": 0.9})
    groups = random_groups(1, count=2, size=3)
    metrics, gradient = step_gradient(config, model_dir, groups, monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected = naive_loss(model, groups, config)
    expected.backward()
    assert metrics["loss"] == pytest.approx(float(expected.detach()), abs=1e-6, rel=5e-6)
    assert metrics["ratio/mean"] == 1.0
    assert_close(gradient, {n: p.grad for n, p in model.named_parameters()})


@pytest.mark.parametrize("kind", ["grpo", "gspo", "dr_grpo"])
def test_layout_micro_batches_and_order_change_nothing(kind, model_dir, monkeypatch):
    groups = random_groups(2, count=4, size=3)
    results = []
    for layout, size, order in itertools.product(("shared", "padded"), (1, 2, 8), (1, -1)):
        monkeypatch.setattr(trainer_module, "plan", partial(plan, layout=layout))
        config = make_config(learner={"micro_batch_groups": size, "loss": {"kind": kind}})
        results.append(step_gradient(config, model_dir, groups[::order], monkeypatch))
    for metrics, gradient in results[1:]:
        assert metrics["loss"] == pytest.approx(results[0][0]["loss"], abs=1e-6)
        assert metrics["mismatch_kl"] == pytest.approx(results[0][0]["mismatch_kl"], rel=1e-5)
        assert_close(gradient, results[0][1])


@pytest.mark.parametrize(
    "law",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(top_k=20),
        SamplingParams(temperature=0.9, min_p=0.05, top_p=0.95),
    ],
)
def test_ratios_are_one_at_equal_versions_whatever_the_law(law, model_dir, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)

    def behaviour(prompt, completion):
        """Overwrites the completion with a sample of the law and returns its log-probabilities."""
        with torch.no_grad():
            for i in range(len(completion)):
                logits = model(torch.tensor([[*prompt, *completion[:i]]])).logits[0, -1:]
                probs = final_logprobs(logits, LawParams.from_requests([law])).exp()
                completion[i] = int(torch.multinomial(probs, 1, generator=generator))
            return plain_logprobs(model, prompt, completion, law).tolist()

    sampling = {"temperature": law.temperature, "top_p": law.top_p, "top_k": law.top_k, "min_p": law.min_p}
    config = make_config(sampling=sampling | {"max_new_tokens": 8})
    metrics, _ = step_gradient(config, model_dir, random_groups(4, logprobs=behaviour), monkeypatch)
    assert metrics["weight/mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch_kl/equal_version"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["excluded/nonfinite_tokens"] == 0
    assert ("entropy" in metrics) == (law.top_p == 1 and law.top_k == -1 and law.min_p == 0)
