"""Attention for sampling in batches with `transformers` on a CPU.

At one query per sequence PyTorch's kernel for bfloat16 takes ten times as long as two plain products (SmolLM2-135M, 64
sequences of 300 tokens, one core: 17 ms a layer against 1.6 ms), and it is most of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from services.learner.attention import attention as whole_rows

NAME = "specroll_decode"
# Said by models whose scores are more than scaled products; those keep PyTorch's kernel.
_EXTRAS = ("position_bias", "s_aux", "softcap", "dropout")


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """query: [B, A, L, D]; key, value: [B, K, T, D] with A a multiple of K; attention_mask: bool [B, 1, L, T] or None.
    Returns [B, L, A, D]."""
    batch, heads, length, width = query.shape
    if query.device.type != "cpu" or any(options.get(name) for name in _EXTRAS):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if length > 1:
        if length == key.shape[2]:
            if attention_mask is not None:  # padding on the left sees nothing, and must not become NaN
                attention_mask = attention_mask | ~attention_mask.any(-1, keepdim=True)
            return whole_rows(module, query, key, value, attention_mask, **options)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scaling = options.get("scaling") or width**-0.5
    # Query heads that share a key head stand together: keys and values are not repeated.
    grouped = (query * scaling).view(batch, key.shape[1], -1, width)
    scores = grouped @ key.transpose(2, 3)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    return (scores.softmax(dim=-1) @ value).view(batch, 1, heads, width), None


def register() -> str:
    """Makes the attention known to `transformers`; returns the name to load a model with."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
