"""`native/round_uniforms.cpp`: what `spec_sampling.round_uniforms` returns, without forty operations on tensors."""

from __future__ import annotations

import ctypes
import functools

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from services.rollout.sglang_plugin.native_code import library
from specroll_core.randomness import Stream


class NativeUniforms:
    """The compiled function. Use `load`."""

    def __init__(self, code: ctypes.CDLL) -> None:
        self._call = code.specroll_round_uniforms
        p, w = ctypes.c_void_p, ctypes.c_int64
        self._call.argtypes = [p, p, w, w, w, w, w, p, p]
        self._call.restype = None

    def __call__(self, info: SamplingBatchInfo, lengths: Tensor, nodes: int, levels: int) -> tuple[Tensor, Tensor]:
        """As `round_uniforms`."""
        seeds, positions = info.sampling_seed.contiguous(), lengths.to(torch.int64).contiguous()
        assert seeds.dtype == torch.int64
        B = len(seeds)
        tree = torch.empty(B, nodes, dtype=torch.float64)
        walk = torch.empty(B, levels, 2, dtype=torch.float64)
        self._call(
            seeds.data_ptr(),
            positions.data_ptr(),
            B,
            nodes,
            levels,
            Stream.TREE,
            Stream.VERIFY,
            tree.data_ptr(),
            walk.data_ptr(),
        )
        return tree, walk


@functools.cache
def load() -> NativeUniforms | None:
    """None where it cannot be compiled here."""
    code = library("round_uniforms")
    return None if code is None else NativeUniforms(code)
