"""The attention of the training model: PyTorch's fused kernel, and plain products where those are faster.

Registered with `transformers` under a name of its own, so that the choice is made for each call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "specroll"

# Up to this row length plain products with a mask beat the fused kernel on a CPU: SmolLM2-135M, a row of 224 tokens,
# one core, forward and backward: 0.52 s against 0.63 s. Their memory grows with the square of the length: not beyond.
PLAIN_LENGTH = 512


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """query: [B, A, L, D]; key, value: [B, K, L, D] with A a multiple of K; attention_mask: bool [B, 1, L, L] or None
    for what the model's own mask says. Returns [B, L, A, D]."""
    plain = (
        attention_mask is not None
        and query.device.type == "cpu"
        and attention_mask.shape[-1] <= PLAIN_LENGTH
        and not options.get("dropout")
        and options.get("position_bias") is None
    )
    if not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    assert attention_mask is not None
    batch, heads, length, width = query.shape
    shared = key.shape[1]
    scaling = options.get("scaling") or width**-0.5
    # Query heads that share a key head are stacked along the length: keys and values are not repeated.
    stacked = (query * scaling).reshape(batch * shared, heads // shared * length, width)
    scores = stacked @ key.reshape(batch * shared, length, width).transpose(1, 2)
    hidden = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(~attention_mask, -torch.inf)
    scores = scores.view(batch, heads, length, length) + hidden
    weights = scores.softmax(dim=-1).view(batch * shared, -1, length)
    out = weights @ value.reshape(batch * shared, length, width)
    return out.view(batch, heads, length, width).transpose(1, 2), None


def register() -> str:
    """Makes the attention known to `transformers`; returns the name to load a model with."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
