"""One GRPO step: from trajectory groups to new weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.config import Config, LossConfig
from services.learner.optimizer import MasterAdamW, StepReport, warmed_up
from services.learner.policy import Policy
from services.learner.training_batch import TrainingBatch, build
from specroll_core.contracts import TrajectoryGroup
from specroll_core.grpo import LossInputs, LossSpec, denominator, policy_loss
from specroll_core.packing import MicroBatch, plan
from specroll_core.sfpo import AlphaSchedule, reposition


class StepInterrupted(Exception):
    """The step was asked to stop before it had changed any weight."""


@dataclass(slots=True)
class _Work:
    """A micro-batch with all that does not change between updates. Tensors [S, T] on the policy's device."""

    batch: MicroBatch
    behaviour: Tensor
    advantages: Tensor
    on_version: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None


class Trainer:
    """The policy, its optimiser and the version of its weights, which is the number of steps taken.

    Consumes batches of trajectory groups; waits for nothing. model_dir: the Hugging Face directory that the run began
    with, also when it is resumed: it is the reference of the KL term where beta > 0.
    """

    def __init__(self, config: Config, model_dir: Path) -> None:
        settings = config.learner
        if settings.threads:
            torch.set_num_threads(settings.threads)
        torch.manual_seed(config.run.seed)
        self.config = config
        self.spec = loss_spec(settings.loss, config.sampling.max_new_tokens)
        self.sampling = config.sampling.to_params()
        self.device = _device(settings.device)
        dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        self.policy = Policy(model_dir, dtype, self.device)
        self.reference: Policy | None = None
        if self.spec.beta > 0:
            self.reference = Policy(model_dir, dtype, self.device)
            self.reference.model.requires_grad_(False)
        self.optimizer = MasterAdamW(
            self.policy.model.named_parameters(),
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
        )
        self.alpha = AlphaSchedule(settings.sfpo.alpha, settings.sfpo.window, settings.sfpo.tau)
        self.version = 0
        self._seconds: dict[str, float] = {}

    def step(
        self, groups: Sequence[TrajectoryGroup], should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Trains on one batch and returns its metrics.

        `should_stop` is asked before every micro-batch until the first update: then `StepInterrupted` is raised and
        nothing has changed. Once weights have changed the step is finished.
        """
        assert groups
        started = time.perf_counter()
        self._seconds = dict.fromkeys(("pack", "proximal", "forward", "backward", "optimizer"), 0.0)
        rate = warmed_up(self.config.learner.learning_rate, self.version, self.config.learner.warmup_steps)
        with self._timed("pack"):
            batch = build(groups, self.config, self.version)
            minibatches = self._minibatches(batch)
        self._fill_references(minibatches, should_stop)
        metrics = batch.metrics
        if not minibatches:
            metrics |= {"loss": 0.0, "grad_norm": 0.0}
        elif self.config.learner.sfpo.steps:
            metrics |= self._slow_fast(minibatches[0], rate, should_stop)
        else:
            totals: dict[str, float] = {}
            for work in minibatches:
                _add(totals, self._update(work, rate, should_stop))
                should_stop = _never
            metrics |= summarise(totals, len(minibatches))
        self.version += 1
        metrics |= {"lr": rate, "skipped_updates/total": float(self.optimizer.skipped)}
        metrics |= {f"seconds/{name}": value for name, value in self._seconds.items()}
        metrics["seconds/step"] = time.perf_counter() - started
        return metrics

    def save_policy(self, directory: Path) -> None:
        """The current weights as a Hugging Face directory."""
        self.policy.save_policy(directory)

    def state(self) -> dict[str, Any]:
        """What a resumed trainer needs beside the optimiser's tensors, as JSON values."""
        return {"version": self.version, "skipped_updates": self.optimizer.skipped, "sfpo": self.alpha.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.version = state["version"]
        self.optimizer.skipped = state["skipped_updates"]
        self.alpha.load_state(state["sfpo"])

    def _minibatches(self, batch: TrainingBatch) -> list[list[_Work]]:
        """The batch cut by groups into as many updates as the configuration wants, each cut into micro-batches."""
        count = min(self.config.learner.minibatches, len(batch.groups))
        out = []
        first = 0
        for index in range(count):
            groups = batch.groups[index * len(batch.groups) // count : (index + 1) * len(batch.groups) // count]
            micro_batches = plan(
                groups,
                self.config.learner.micro_batch_groups,
                hidden_size=self.policy.hidden_size,
                layer_params=self.policy.layer_params,
                layout=self.policy.layout,
                pad_id=self.policy.pad_id,
            )
            out.append([self._work(batch, micro_batch, first) for micro_batch in micro_batches])
            first += sum(len(g.completions) for g in groups)
        return out

    def _work(self, batch: TrainingBatch, micro_batch: MicroBatch, first: int) -> _Work:
        samples = [first + s for s in micro_batch.samples]
        mask = micro_batch.packed.mask
        return _Work(
            batch=MicroBatch(micro_batch.packed.to(self.device), micro_batch.samples),
            behaviour=batch.behaviour(samples, mask).to(self.device),
            advantages=torch.tensor([batch.advantages[s] for s in samples], device=self.device),
            on_version=batch.on_version(samples, mask, self.version).to(self.device),
        )

    @torch.no_grad()
    def _fill_references(self, minibatches: list[list[_Work]], should_stop: Callable[[], bool]) -> None:
        """Log-probabilities of the proximal policy, where later updates would have moved it, and of the reference."""
        with self._timed("proximal"):
            for work in (w for minibatch in minibatches for w in minibatch):
                _check(should_stop)
                if len(minibatches) > 1:
                    work.proximal = self.policy.token_logprobs(work.batch.packed, self.sampling).logprobs
                if self.reference is not None:
                    work.reference = self.reference.token_logprobs(work.batch.packed, self.sampling).logprobs

    def _update(self, minibatch: list[_Work], rate: float, should_stop: Callable[[], bool]) -> dict[str, float]:
        """One optimiser update over the whole minibatch; the sums of its statistics."""
        expected = sum(denominator(work.batch.packed.mask, self.spec) for work in minibatch)
        totals: dict[str, Tensor] = {}
        for work in minibatch:
            if should_stop():
                self.optimizer.zero_grad()
                raise StepInterrupted
            with self._timed("forward"):
                result = self.policy.token_logprobs(work.batch.packed, self.sampling)
                inputs = LossInputs(
                    logprobs=result.logprobs,
                    behaviour=work.behaviour,
                    advantages=work.advantages,
                    mask=work.batch.packed.mask,
                    proximal=work.proximal,
                    reference=work.reference,
                    on_version=work.on_version,
                    entropy=result.entropy,
                )
                loss, statistics = policy_loss(inputs, self.spec, expected)
            if self.config.learner.sfpo.steps and work.proximal is None:
                work.proximal = result.logprobs.detach()
            with self._timed("backward"):
                loss.backward()
            _add(totals, statistics | {"loss": loss.detach()})
        sums = {name: float(value) for name, value in totals.items()}
        # Tokens whose log-probabilities were not finite have left the denominator.
        scale = expected / sums["denominator"] if sums["denominator"] else 1.0
        with self._timed("optimizer"):
            report: StepReport = self.optimizer.step(rate, scale)
        if self.sampling_has_filters:
            del sums["entropy_sum"]
        return sums | {"loss": sums["loss"] * scale, "grad_norm": report.grad_norm}

    def _slow_fast(self, minibatch: list[_Work], rate: float, should_stop: Callable[[], bool]) -> dict[str, float]:
        """SFPO: fast updates, reposition, slow update. Metrics are those of the first update, on the sampled policy."""
        alpha = self.alpha.alpha
        if alpha == 0:
            metrics = summarise(self._update(minibatch, rate, should_stop), 1)
        else:
            start = self.optimizer.snapshot()
            metrics = summarise(self._update(minibatch, rate, should_stop), 1)
            for _ in range(self.config.learner.sfpo.steps - 1):
                self._update(minibatch, rate, _never)
            self.optimizer.assign(reposition(start, self.optimizer.snapshot(), alpha))
            self._update(minibatch, rate, _never)
        zscore = self.alpha.observe(metrics["entropy"]) if "entropy" in metrics else 0.0
        return metrics | {"sfpo/alpha": alpha, "sfpo/entropy_zscore": zscore}

    @property
    def sampling_has_filters(self) -> bool:
        return self.sampling.top_k != -1 or self.sampling.top_p < 1 or self.sampling.min_p > 0

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started


def loss_spec(loss: LossConfig, max_new_tokens: int) -> LossSpec:
    return LossSpec(
        kind=loss.kind,
        correction=loss.correction,
        level=loss.level,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        cap=loss.cap,
        band=loss.band,
        beta=loss.beta,
        max_new_tokens=max_new_tokens,
    )


def summarise(sums: dict[str, float], updates: int) -> dict[str, float]:
    """Metrics from the sums over a step's updates. A mean over no tokens is left out, never reported as 0."""
    metrics = {
        "loss": sums["loss"] / updates,
        "grad_norm": sums["grad_norm"] / updates,
        "tokens": sums["tokens"],
        "excluded/nonfinite_tokens": sums["nonfinite"],
    }
    if sums["tokens"]:
        per_token = {
            "ratio/mean": "ratio_sum",
            "clip/low/frac": "clipped_low",
            "clip/high/frac": "clipped_high",
            "weight/mean": "weight_sum",
            "weight/bounded/frac": "weight_bounded",
            "mismatch_kl": "mismatch_kl_sum",
            "reference_kl": "kl_sum",
            "entropy": "entropy_sum",
        }
        metrics |= {name: sums[key] / sums["tokens"] for name, key in per_token.items() if key in sums}
        metrics["clip/frac"] = metrics["clip/low/frac"] + metrics["clip/high/frac"]
    if sums["on_version_tokens"]:
        metrics["mismatch_kl/equal_version_tokens"] = sums["on_version_tokens"]
        metrics["mismatch_kl/equal_version"] = sums["on_version_mismatch_kl_sum"] / sums["on_version_tokens"]
    return metrics


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _check(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise StepInterrupted


def _never() -> bool:
    return False


def _add(totals: dict, values: dict) -> None:
    for name, value in values.items():
        totals[name] = totals[name] + value if name in totals else value
