"""Training future-token heads on the target's own rollouts.

Head k learns the target's law k places ahead: KL to the target's most likely tokens, with weight 0.8^(k-1), since a
deep head only counts where the ones before it were right. It is the mean over the temperatures that are sampled at:
both laws are divided by each. Rows are positions of whole trajectories, so the target of row i's head k is simply
that of row i + k and nothing is stored twice.

Retraining starts from the serving heads and is held near them by `anchor |theta - theta_0|^2`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specroll_core.heads import FutureTokenHeads


@dataclass(frozen=True)
class HeadRows:
    """P positions of trajectories, one after the other.

    tokens: [P] int64, the token at each position. hidden: [P, H], the target's last hidden state *before* it, whose
    law it was drawn from. target_ids: [P, C] int64 and target_logprobs: [P, C], the C most likely tokens of that law
    at temperature 1, and their log-probabilities. sequence: [P] int64, equal within a trajectory, whose positions
    are adjacent. prompt: [P] int64, equal for trajectories of one prompt. Row i asks heads to guess tokens
    i + 1 ... i + K. starts: [P] bool, rows to train on; others serve as targets alone and need no hidden state.
    None takes all.
    """

    tokens: Tensor
    hidden: Tensor
    target_ids: Tensor
    target_logprobs: Tensor
    sequence: Tensor
    prompt: Tensor
    starts: Tensor | None = None

    def __post_init__(self) -> None:
        P = self.tokens.shape[0]
        for name in ("hidden", "target_ids", "target_logprobs", "sequence", "prompt"):
            if getattr(self, name).shape[0] != P:
                raise ValueError(f"{name} has {getattr(self, name).shape[0]} rows, but tokens has {P}.")
        if self.target_ids.shape != self.target_logprobs.shape:
            raise ValueError("target_ids and target_logprobs must have the same shape.")

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def select(self, mask: Tensor) -> HeadRows:
        """The rows of `mask` [P] bool, which must keep trajectories whole."""
        return HeadRows(
            self.tokens[mask],
            self.hidden[mask],
            self.target_ids[mask],
            self.target_logprobs[mask],
            self.sequence[mask],
            self.prompt[mask],
            None if self.starts is None else self.starts[mask],
        )

    def split_by_prompt(self, holdout: float, seed: int) -> tuple[HeadRows, HeadRows]:
        """Training and held-out rows: whole prompts, never rows, so that siblings do not leak.

        At least one prompt is held out where there are two or more and `holdout` is above 0.
        """
        prompts = self.prompt.unique()
        count = min(len(prompts) - 1, max(1, round(holdout * len(prompts)))) if holdout > 0 else 0
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).to(prompts.device)
        held = torch.isin(self.prompt, prompts[order[:count]])
        return self.select(~held), self.select(held)

    def has_target(self, heads: int) -> Tensor:
        """[P, K] bool: whether row i is trained on and position i + k belongs to its trajectory."""
        out = torch.zeros(len(self), heads, dtype=torch.bool, device=self.tokens.device)
        for k in range(1, heads + 1):
            out[:-k, k - 1] = self.sequence[k:] == self.sequence[:-k]
        return out if self.starts is None else out & self.starts[:, None]


@dataclass(frozen=True, slots=True)
class HeadTrainConfig:
    """anchor: weight of the squared distance from the weights that training started from. micro_rows bounds memory:
    micro_rows x K x V float32 numbers are held a few times over. holdout: share of prompts. temperatures: those that
    the loss is the mean over."""

    epochs: int = 5
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    depth_weight: float = 0.8
    anchor: float = 0.0
    batch_rows: int = 256
    micro_rows: int = 64
    warmup_steps: int = 20
    max_grad_norm: float = 1.0
    holdout: float = 0.1
    seed: int = 0
    temperatures: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if min(self.epochs, self.batch_rows, self.micro_rows) < 1:
            raise ValueError("epochs, batch_rows and micro_rows must be at least 1.")
        if not self.learning_rate > 0:
            raise ValueError("learning_rate must be above 0.")
        if not 0 <= self.holdout < 1:
            raise ValueError("holdout must be at least 0 and below 1.")
        if not self.temperatures or not all(t > 0 for t in self.temperatures):
            raise ValueError("temperatures must hold at least one number, all above 0.")


@dataclass(slots=True)
class TrainPosition:
    """Where a training stands, enough to go on from it with the heads as they are. step: steps taken. optimizer:
    AdamW's; start: the weights that training began with, in the heads' order, which the anchor holds on to."""

    step: int
    optimizer: torch.optim.Optimizer
    start: list[Tensor]


@dataclass(frozen=True, slots=True)
class HeadTrainReport:
    """Losses are KL in nats per head, at depths 1 to K; NaN where no row was held out."""

    train_rows: int
    heldout_rows: int
    steps: int
    train_loss: float
    heldout_before: tuple[float, ...]
    heldout_after: tuple[float, ...]


def head_kl(
    heads: FutureTokenHeads,
    rows: HeadRows,
    index: Tensor,
    lm_head: Tensor,
    embedding: Tensor,
    temperatures: Sequence[float] = (1.0,),
) -> Tensor:
    """KL(p || q_k) of rows `index` [R]: [R, K] float32, NaN-free; 0 where a head has no target.

    p is the target's law on its stored tokens, renormalised. lm_head, embedding: [V, H] in the heads' type.
    """
    z = _states(heads, rows, index, embedding)
    kl, _ = _kl_and_gradient(z, rows, index, lm_head, temperatures)
    return kl


def _states(heads: FutureTokenHeads, rows: HeadRows, index: Tensor, embedding: Tensor) -> Tensor:
    """[R, K, H] in the heads' type."""
    dtype = heads.down.dtype
    z: Tensor = heads(rows.hidden[index].to(dtype), embedding[rows.tokens[index]].to(dtype))
    return z


@torch.no_grad()
def _kl_and_gradient(
    z: Tensor,
    rows: HeadRows,
    index: Tensor,
    lm_head: Tensor,
    temperatures: Sequence[float],
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Mean over temperatures of KL(p || softmax(W z / T)): [R, K] float32, and the gradient of its sum, weighted by
    `weights` [K], with respect to z: [R, K, H] float32.

    Written out, because the gradient with respect to the logits is no more than (q - p) / T: one product forward and
    one back for all temperatures, with nothing kept in between.
    """
    R, K, _ = z.shape
    logits = F.linear(z.reshape(R * K, -1).to(lm_head.dtype), lm_head).float()
    ahead = torch.arange(1, K + 1, device=index.device)
    at = (index[:, None] + ahead).clamp_max(len(rows) - 1)
    there = rows.sequence[at] == rows.sequence[index][:, None]
    there &= index[:, None] + ahead < len(rows)
    ids = rows.target_ids[at].view(R * K, -1)
    stored = rows.target_logprobs[at].view(R * K, -1).float()
    kl = logits.new_zeros(R * K)
    slope = None if weights is None else torch.zeros_like(logits)
    share = there.float() if weights is None else there * weights
    for temperature in temperatures:
        log_p = (stored / temperature).log_softmax(-1)
        log_q = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
        # A stored log-probability of -inf is padding: it has no weight.
        p = log_p.exp()
        terms = torch.where(p > 0, p * (log_p - log_q.gather(-1, ids)), 0.0)
        kl += terms.sum(-1) / len(temperatures)
        if slope is not None:
            scale = share.view(-1, 1) / (temperature * len(temperatures))
            slope.addcmul_(log_q.exp_(), scale)
            slope.scatter_add_(-1, ids, p * -scale)
    gradient = None if slope is None else (slope.to(lm_head.dtype) @ lm_head).float().view(R, K, -1)
    return torch.where(there, kl.view(R, K), 0.0), gradient


def train_heads(
    heads: FutureTokenHeads,
    rows: HeadRows,
    lm_head: Tensor,
    embedding: Tensor,
    config: HeadTrainConfig | None = None,
    progress: Callable[[int, int, float], None] | None = None,
    *,
    position: Callable[[TrainPosition], None] | None = None,
    resume: Callable[[TrainPosition], None] | None = None,
) -> HeadTrainReport:
    """Trains the heads in place and reports the loss on held-out prompts before and after.

    lm_head, embedding: [V, H], frozen. Products with the LM head are made in its type: bfloat16 is several times as
    fast as float32 where the machine has it, and is what serves. progress(step, steps, loss) is called after every
    step; an exception that it raises ends the training. `position` is called before it, to be saved. resume: fills a
    position that was saved, for heads as they were then and the same rows and configuration; what follows is what
    would have followed. Raises ValueError where no row has a target.
    """
    config = config or HeadTrainConfig()
    lm_head, embedding = lm_head.detach(), embedding.detach()
    train, held = rows.split_by_prompt(config.holdout, config.seed)
    usable = train.has_target(heads.spec.heads).any(-1).nonzero().squeeze(1)
    if usable.numel() == 0:
        raise ValueError("rows must hold at least one trajectory of two tokens.")
    before = evaluate_heads(heads, held, lm_head, embedding, config.micro_rows)
    start = [p.detach().clone() for p in heads.parameters()]
    optimizer = torch.optim.AdamW(heads.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    per_epoch = math.ceil(usable.numel() / config.batch_rows)
    steps = config.epochs * per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps, config.warmup_steps))
    weights = config.depth_weight ** torch.arange(heads.spec.heads, device=lm_head.device)
    generator = torch.Generator().manual_seed(config.seed)
    at = TrainPosition(0, optimizer, start)
    if resume is not None:
        resume(at)
        schedule.last_epoch = at.step
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _rate(at.step, steps, config.warmup_steps)
    step, running = 0, math.nan
    for _ in range(config.epochs):
        order = usable[torch.randperm(usable.numel(), generator=generator).to(usable.device)]
        for batch in order.split(config.batch_rows):
            if step < at.step:
                step += 1  # taken before the training was interrupted
                continue
            optimizer.zero_grad(set_to_none=True)
            loss = 0.0
            for micro in batch.split(config.micro_rows):
                z = _states(heads, train, micro, embedding)
                share = weights / batch.numel()
                kl, gradient = _kl_and_gradient(z.detach(), train, micro, lm_head, config.temperatures, share)
                z.backward(gradient)
                loss += float((kl * share).sum())
            if config.anchor > 0:
                distance = sum(((p - p0) ** 2).sum() for p, p0 in zip(heads.parameters(), at.start, strict=True))
                assert isinstance(distance, Tensor)
                (config.anchor * distance).backward()
            torch.nn.utils.clip_grad_norm_(heads.parameters(), config.max_grad_norm)
            optimizer.step()
            schedule.step()
            at.step = step = step + 1
            running = loss if math.isnan(running) else 0.95 * running + 0.05 * loss
            if position is not None:
                position(at)
            if progress is not None:
                progress(step, steps, loss)
    after = evaluate_heads(heads, held, lm_head, embedding, config.micro_rows)
    return HeadTrainReport(len(train), len(held), steps, running, before, after)


@torch.no_grad()
def evaluate_heads(
    heads: FutureTokenHeads, rows: HeadRows, lm_head: Tensor, embedding: Tensor, micro_rows: int = 64
) -> tuple[float, ...]:
    """Mean KL of each head over the rows that have its target; NaN where none has."""
    total = torch.zeros(heads.spec.heads, dtype=torch.float64)
    there = rows.has_target(heads.spec.heads)
    usable = there.any(-1).nonzero().squeeze(1)
    for index in usable.split(micro_rows) if usable.numel() else ():
        total += head_kl(heads, rows, index, lm_head, embedding).sum(0).double().cpu()
    return tuple((total / there.sum(0).cpu()).tolist())


def _rate(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    warmup = min(warmup, steps // 10)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
