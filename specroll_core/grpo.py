"""Policy losses of the GRPO family for data that may be off-policy.

Three policies: behaviour `mu` (sampled the tokens; its log-probabilities come with them), proximal (the policy when
the optimiser step began) and target `pi` (the one being differentiated). Per token `r = pi / prox` and `w = prox / mu`;
the objective is clipped in `r` and weighted by a bounded, constant function of `w` (AReaL, arXiv 2505.24298, 5.2).

======= =========================================== ============================================= ==========
kind    per token, before the weight                denominator                                   source
======= =========================================== ============================================= ==========
grpo    -min(r A, clip(r) A)                        tokens of the batch                           2402.03300
dapo    the same                                    tokens of the batch                           2503.14476
dr_grpo the same, A without the standard deviation  sequences of the batch times `max_new_tokens` 2503.20783
gspo    -min(s A, clip(s) A), s = exp(mean_t log r) sequences, a token counts 1 / sequence length 2507.18071
cispo   -constant(clip(r)) A log pi                 tokens of the batch                           2506.13585
======= =========================================== ============================================= ==========

`grpo` takes the mean over the tokens of the batch, not the mean of means over sequences: long answers are not
discounted. `dapo` differs from it outside of this file: overlong shaping of the reward (`specroll_core/advantage.py`).

Losses are sums divided by a denominator of the *whole batch*, which the caller passes in; so they add up over
micro-batches, and neither padding nor packing changes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"]
Correction = Literal["decoupled", "tis", "icepop", "none"]
Level = Literal["token", "sequence"]

# exp(20) = 4.9e8 keeps ratios and their products with advantages finite in float32.
MAX_LOG_RATIO = 20.0

# AReaL's bound for the decoupled objective and the usual one of truncated importance sampling.
DEFAULT_CAP: dict[str, float] = {"decoupled": 5.0, "tis": 2.0}


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Which loss, and its bounds.

    clip_low, clip_high: `clip(r) = clamp(r, 1 - clip_low, 1 + clip_high)`. cap: upper bound of `w` for `decoupled`
    and `tis`, None takes 5 and 2. band: `icepop` keeps `w` inside it and drops the token outside. level: whether `w`
    is a token's own or the product over its sequence. beta: weight of the KL to the reference (k3 estimator).
    max_new_tokens: the constant of `dr_grpo`.
    """

    kind: Kind = "grpo"
    correction: Correction = "decoupled"
    level: Level = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    cap: float | None = None
    band: tuple[float, float] = (0.5, 5.0)
    beta: float = 0.0
    max_new_tokens: int = 128


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch of S completions, padded to T tokens. All tensors on one device.

    logprobs: float32 [S, T], of the policy being trained, with gradient. behaviour: float32 [S, T].
    proximal: float32 [S, T], or None where the step has one optimiser update: then it is `logprobs`, detached.
    reference: float32 [S, T], needed where beta > 0. advantages: float32 [S].
    mask: bool [S, T], tokens that count. on_version: bool [S, T], tokens sampled from the current version; only for the
    statistics. entropy: float32 [S, T], only for the statistics.
    """

    logprobs: Tensor
    behaviour: Tensor
    advantages: Tensor
    mask: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None
    on_version: Tensor | None = None
    entropy: Tensor | None = None


def denominator(mask: Tensor, spec: LossSpec) -> float:
    """What the sums over a batch with this mask, bool [S, T], are divided by. Adds up over micro-batches."""
    if spec.kind == "gspo":
        return float(mask.any(dim=1).sum())
    if spec.kind == "dr_grpo":
        return float(mask.any(dim=1).sum()) * spec.max_new_tokens
    return float(mask.sum())


def policy_loss(inputs: LossInputs, spec: LossSpec, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the loss, a scalar, and its statistics as sums.

    Tokens with a log-probability that is not finite leave the loss. They leave the denominator too, but only the
    caller sees the whole batch: the statistic `denominator` is what this micro-batch contributes without them, so the
    caller scales the gradient by `denominator / sum(statistics["denominator"])` before the update.

    Statistics are float64 scalars that add up over micro-batches; their names end in `_sum` where they are sums
    of values and are counts otherwise. The caller divides them by `tokens`, `sequences` or `on_version_tokens`.
    """
    current, proximal, behaviour = inputs.logprobs, inputs.proximal, inputs.behaviour
    proximal = current.detach() if proximal is None else proximal
    valid = inputs.mask & current.detach().isfinite() & proximal.isfinite() & behaviour.isfinite()
    if spec.beta > 0:
        assert inputs.reference is not None, "beta > 0 needs the reference's log-probabilities"
        valid = valid & inputs.reference.isfinite()

    # where() before any arithmetic: infinity times a mask of 0 would be NaN, in the gradient too.
    current = torch.where(valid, current, 0.0)
    proximal = torch.where(valid, proximal, 0.0)
    behaviour = torch.where(valid, behaviour, 0.0)
    lengths = valid.sum(dim=1, keepdim=True).clamp(min=1)
    advantages = inputs.advantages.to(current.dtype).unsqueeze(1)

    log_ratio = _bounded(current - proximal)
    if spec.kind == "gspo":
        log_ratio = (log_ratio.sum(dim=1, keepdim=True) / lengths).expand_as(current)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    if spec.kind == "cispo":
        objective = clipped.detach() * advantages * current
    else:
        objective = torch.minimum(ratio * advantages, clipped * advantages)

    log_weight = _bounded(proximal - behaviour)
    weight, bounded = importance_weight(log_weight, spec)
    per_token = -weight * objective
    kl = torch.zeros_like(current)
    if spec.beta > 0:
        assert inputs.reference is not None
        kl = k3(_bounded(torch.where(valid, inputs.reference, 0.0) - current))
        per_token = per_token + spec.beta * kl
    if spec.kind == "gspo":
        per_token = per_token / lengths
    # The sums are in double precision: they must not depend on how a batch is cut.
    loss = torch.where(valid, per_token, 0.0).sum(dtype=torch.float64) / max(denominator, 1.0)

    with torch.no_grad():
        statistics = _statistics(inputs, spec, valid, ratio, clipped, advantages, log_weight, weight, bounded, kl)
    return loss, statistics


def importance_weight(log_weight: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """The correction for `w = prox / mu`, and where its bound took effect: float32 and bool [S, T].

    log_weight: [S, T], without gradient, 0 where a token does not count.
    """
    if spec.correction == "none":
        return torch.ones_like(log_weight), torch.zeros_like(log_weight, dtype=torch.bool)
    if spec.level == "sequence":
        log_weight = _bounded(log_weight.sum(dim=1, keepdim=True)).expand_as(log_weight)
    weight = log_weight.exp()
    if spec.correction == "icepop":
        low, high = spec.band
        outside = (weight < low) | (weight > high)
        return weight.masked_fill(outside, 0.0), outside
    cap = spec.cap if spec.cap is not None else DEFAULT_CAP[spec.correction]
    return weight.clamp(max=cap), weight > cap


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's k3 estimator of KL(a || b) at samples of a: `exp(d) - 1 - d`, d = log b - log a; never negative."""
    return torch.expm1(log_ratio) - log_ratio


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _statistics(
    inputs: LossInputs,
    spec: LossSpec,
    valid: Tensor,
    ratio: Tensor,
    clipped: Tensor,
    advantages: Tensor,
    log_weight: Tensor,
    weight: Tensor,
    bounded: Tensor,
    kl: Tensor,
) -> dict[str, Tensor]:
    def total(values: Tensor) -> Tensor:
        return torch.where(valid, values, 0.0).sum(dtype=torch.float64)

    def count(flags: Tensor) -> Tensor:
        return (flags & valid).sum(dtype=torch.float64)

    mismatch = k3(log_weight)
    on_version = torch.zeros_like(valid) if inputs.on_version is None else inputs.on_version
    # Clipped: the bound holds the gradient back, that is the unclipped term is the better one.
    binds = (ratio != clipped) & (ratio * advantages > clipped * advantages)
    return {
        "denominator": torch.tensor(denominator(valid, spec), dtype=torch.float64, device=valid.device),
        "tokens": valid.sum(dtype=torch.float64),
        "sequences": valid.any(dim=1).sum(dtype=torch.float64),
        "nonfinite": (inputs.mask & ~valid).sum(dtype=torch.float64),
        "ratio_sum": total(ratio),
        "clipped_low": count(binds & (ratio < 1)),
        "clipped_high": count(binds & (ratio > 1)),
        "weight_sum": total(weight),
        "weight_bounded": count(bounded),
        "mismatch_kl_sum": total(mismatch),
        "on_version_tokens": count(on_version),
        "on_version_mismatch_kl_sum": total(torch.where(on_version, mismatch, 0.0)),
        "kl_sum": total(kl),
        "entropy_sum": total(torch.zeros_like(ratio) if inputs.entropy is None else inputs.entropy),
    }
