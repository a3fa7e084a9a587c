"""`native/tree_attention.cpp`, called on tensors."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from services.rollout.sglang_plugin.native_code import library

_DTYPES = (torch.bfloat16, torch.float32)
_HEAD_SIZES = (32, 64, 96, 128)


@dataclass(frozen=True, slots=True)
class Queries:
    """What every layer of a forward has in common: `nodes` queries of each of B requests.

    requests: [B] int64, their rows of the slot table; lengths: [B] int64, the keys that all queries of a request see;
    trees: [B, nodes, nodes] bool, which of the `nodes` keys after these each query sees, or None where there are none.
    """

    requests: Tensor
    lengths: Tensor
    nodes: int
    trees: Tensor | None = None


def fits(dtype: torch.dtype, head_size: int, value_size: int) -> bool:
    """Whether there is code for heads of this kind."""
    return dtype in _DTYPES and head_size == value_size and head_size in _HEAD_SIZES


class NativeAttention:
    """The compiled function. Use `load`."""

    def __init__(self, code: ctypes.CDLL) -> None:
        self._call = code.specroll_tree_attention
        i, p, w = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
        self._call.argtypes = [i, i, p, p, p, p, p, w, p, p, p, i, i, i, i, ctypes.c_float, i]
        self._call.restype = i

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, queries: Queries, scale: float) -> Tensor:
        """q: [B * nodes, query heads, D]; keys, values: [slots, key heads, D], of q's type; table: [rows, context]
        int32, the slot of each position. Returns [B * nodes, query heads * D]."""
        q = q.contiguous()
        _, heads, size = q.shape
        requests, lengths, trees = queries.requests, queries.lengths, queries.trees
        assert all(x.is_contiguous() for x in (keys, values, requests, lengths))
        assert table.stride(1) == 1
        assert trees is None or trees.is_contiguous()
        assert {keys.dtype, values.dtype} == {q.dtype}
        assert (table.dtype, requests.dtype, lengths.dtype) == (torch.int32, torch.int64, torch.int64)
        assert q.shape[0] == len(requests) * queries.nodes
        out = q.new_empty(q.shape[0], heads * size)
        failed = self._call(
            q.dtype == torch.bfloat16,
            size,
            q.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            table.data_ptr(),
            table.stride(0),
            requests.data_ptr(),
            lengths.data_ptr(),
            None if trees is None else trees.data_ptr(),
            len(requests),
            queries.nodes,
            heads,
            keys.shape[1],
            scale,
            torch.get_num_threads(),
        )
        assert not failed, "asked for a kind of heads that `fits` denies"
        return out


@functools.cache
def load() -> NativeAttention | None:
    """None where it cannot be compiled here."""
    code = library("tree_attention")
    return None if code is None else NativeAttention(code)
