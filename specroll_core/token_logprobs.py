"""Log-probabilities of given tokens from hidden states, without the [tokens, vocabulary] matrix in float32.

For a law that only has a temperature. The matrix of logits is the largest tensor of a training step (1,500 tokens times
49,152 words are 295 MB in float32, and the usual log-softmax with its gradient holds three of them). Here it is
computed for a bounded number of rows at a time, kept in the model's dtype, and turned into its own gradient in blocks
that fit a CPU's cache.

A logit of 20 has a step of 0.125 in bfloat16, which alone makes a KL of 1e-3 between an engine and a learner. So where
the weights are in bfloat16, the logits that matter, those of the given tokens and of every token that carries more than
`_EXACT_FROM` of the most likely one's mass, are computed again as float32 dot products: a few per row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows whose logits are in float32 at once: 16 rows of 49,152 are 3 MB, which stays in the last-level cache.
_CPU_BLOCK = 16
_GPU_BLOCK = 1024
# Words below this share of the top word's mass are too many to compute again, and too light to matter.
_EXACT_FROM = 0.01


def linear_token_logprobs(
    hidden: Tensor, weight: Tensor, token_row: Tensor, token_ids: Tensor, temperature: float, logit_bytes: int
) -> tuple[Tensor, Tensor]:
    """`log_softmax(hidden @ weight.T / temperature)` at given tokens, and the entropies of these laws.

    hidden: [P, H], in the weight's dtype or float32; weight: [V, H]. token_row: int64 [N], row of `hidden` that
    predicts the token; token_ids: int64 [N]. Returns float32 [N] log-probabilities, differentiable once in `hidden`
    and `weight`, and float32 [N] entropies in nats without gradient.
    logit_bytes: bound of the memory for logits. Where all rows fit they are kept for the backward pass; otherwise they
    are computed again there, chunk by chunk.
    """
    rows = max(1, logit_bytes // (weight.shape[0] * weight.element_size()))
    logprobs, entropy = _LinearTokenLogprobs.apply(hidden, weight, token_row, token_ids, temperature, rows)
    return logprobs, entropy


class _LinearTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        token_row: Tensor,
        token_ids: Tensor,
        temperature: float,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        log_normaliser = hidden.new_empty(count, dtype=torch.float32)
        entropy = torch.empty_like(log_normaliser)
        chosen = hidden.new_empty(token_row.shape[0], dtype=torch.float32)
        # Tokens in the order of their rows, so that each block finds its own in one slice.
        order = token_row.argsort()
        bounds = _bounds(token_row[order], count)
        kept = None
        rounded = weight.dtype != torch.float32
        for start in range(0, count, chunk_rows):
            logits = F.linear(hidden[start : start + chunk_rows].to(weight.dtype), weight)
            if chunk_rows >= count and any(ctx.needs_input_grad[:2]):
                kept = logits
            for low, high in _blocks(logits):
                scaled = logits[low:high].float() / temperature
                tokens = order[bounds[start + low] : bounds[start + high]]
                if rounded:
                    local = (token_row[tokens] - (start + low), token_ids[tokens])
                    _make_exact(scaled, hidden[start + low : start + high], weight, local, temperature)
                top = scaled.amax(dim=1, keepdim=True)
                scaled -= top
                exps = scaled.exp()
                total = exps.sum(dim=1)
                log_total = total.log()
                block = slice(start + low, start + high)
                log_normaliser[block] = log_total + top.squeeze(1)
                # sum p x of shifted logits. A logit of -inf has p = 0 and adds nothing; 0 * -inf would be NaN.
                mean = (exps * scaled.clamp(min=torch.finfo(torch.float32).min)).sum(dim=1) / total
                entropy[block] = log_total - mean
                chosen[tokens] = (
                    scaled[token_row[tokens] - (start + low), token_ids[tokens]]
                    - log_total[token_row[tokens] - (start + low)]
                )
        ctx.save_for_backward(hidden, weight, token_row, token_ids, log_normaliser, order)
        ctx.bounds, ctx.kept, ctx.temperature, ctx.chunk_rows = bounds, kept, temperature, chunk_rows
        token_entropy = entropy[token_row]
        ctx.mark_non_differentiable(token_entropy)
        return chosen, token_entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, token_row, token_ids, log_normaliser, order = ctx.saved_tensors
        count = hidden.shape[0]
        grad = grad.float() / ctx.temperature
        row_grad = torch.zeros_like(log_normaliser).index_add_(0, token_row, grad)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        for start in range(0, count, ctx.chunk_rows):
            part = hidden[start : start + ctx.chunk_rows].to(weight.dtype)
            # The kept logits become their own gradient in place and are gone afterwards.
            logits = F.linear(part, weight) if ctx.kept is None else ctx.kept
            ctx.kept = None
            for low, high in _blocks(logits):
                rows = slice(start + low, start + high)
                block = logits[low:high].float()
                block /= ctx.temperature
                block -= log_normaliser[rows].unsqueeze(1)
                block.exp_()
                block *= -row_grad[rows].unsqueeze(1)
                tokens = order[ctx.bounds[start + low] : ctx.bounds[start + high]]
                block.index_put_((token_row[tokens] - (start + low), token_ids[tokens]), grad[tokens], accumulate=True)
                logits[low:high] = block
            grad_hidden[start : start + ctx.chunk_rows] = logits @ weight
            if ctx.needs_input_grad[1]:
                share = logits.T @ part
                grad_weight = share if grad_weight is None else grad_weight + share
        return grad_hidden, grad_weight, None, None, None, None


def _make_exact(
    scaled: Tensor, hidden: Tensor, weight: Tensor, tokens: tuple[Tensor, Tensor], temperature: float
) -> None:
    """Replaces entries of `scaled` [n, V], float32, by float32 dot products: those of (row, id) and the likely ones."""
    rows, ids = (scaled > scaled.amax(dim=1, keepdim=True) + math.log(_EXACT_FROM)).nonzero(as_tuple=True)
    rows, ids = torch.cat([rows, tokens[0]]), torch.cat([ids, tokens[1]])
    scaled[rows, ids] = (hidden[rows].float() * weight[ids].float()).sum(dim=1) / temperature


def _blocks(logits: Tensor) -> list[tuple[int, int]]:
    size = _CPU_BLOCK if logits.device.type == "cpu" else _GPU_BLOCK
    return [(low, min(low + size, logits.shape[0])) for low in range(0, logits.shape[0], size)]


def _bounds(sorted_rows: Tensor, count: int) -> list[int]:
    """bounds[p]: how many tokens have a row below p, for p in [0, count]."""
    edges = torch.arange(count + 1, device=sorted_rows.device)
    return [int(b) for b in torch.searchsorted(sorted_rows.contiguous(), edges).tolist()]
