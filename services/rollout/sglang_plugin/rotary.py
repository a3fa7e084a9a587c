"""Rotary position embedding on a CPU in three operations for the queries and three for the keys.

SGLang's plain path takes ten of each, which for a small model is an eighth of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TABLE = "specroll_table"


def rotate(original, layer, positions: Tensor, query: Tensor, key: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
    """A hook around `RotaryEmbedding.forward_native`: positions [T] int64; query, key [T, heads * D].

    Halves (x1, x2) become (x1 cos - x2 sin, x2 cos + x1 sin); other styles are left to SGLang.
    """
    whole = layer.is_neox_style and layer.rotary_dim == layer.head_size
    if not whole or args or any(value is not None for value in kwargs.values()) or hasattr(layer, "sin_cos_cache"):
        return original(layer, positions, query, key, *args, **kwargs)
    table = getattr(layer, _TABLE, None)
    if table is None or table.dtype != query.dtype or len(table) != len(layer.cos_sin_cache):
        cos, sin = layer.cos_sin_cache.to(query.dtype).chunk(2, dim=-1)
        table = torch.cat((cos, cos, -sin, sin), dim=-1)
        setattr(layer, _TABLE, table)
    cos, sin = table.index_select(0, positions.flatten()).unsqueeze(1).chunk(2, dim=-1)
    return _turned(query, cos, sin), _turned(key, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = x.view(len(cos), -1, cos.shape[-1])
    return torch.addcmul(heads * cos, heads.roll(cos.shape[-1] // 2, -1), sin).view(x.shape)
