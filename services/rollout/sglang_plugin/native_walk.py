"""`native/tree_walk.cpp`: what `specroll_core.verify.verify` returns, for laws that are a temperature and no more.

On a CPU the walk in PyTorch takes some thirty operations a level, each a pass over rows of the vocabulary. Here one
function reads a node's logits and decides, request by request.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TypeGuard

import torch
from torch import Tensor

from services.rollout.sglang_plugin.native_code import library
from specroll_core.law import LawParams
from specroll_core.proposal import DepthLaws
from specroll_core.tree import DraftTree
from specroll_core.verified import Verified

_DTYPES = (torch.bfloat16, torch.float32)


class NativeWalk:
    """The compiled function. Use `load`."""

    def __init__(self, code: ctypes.CDLL) -> None:
        self._call = code.specroll_tree_walk
        i, p, w = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
        self._call.argtypes = [i, p, w, p, p, p, p, p, p, p, p, p, i, w, p, i, i, i, p, p, p, p, p, p, p, i]
        self._call.restype = None

    @staticmethod
    def fits(logits: Tensor | None, params: LawParams) -> TypeGuard[Tensor]:
        """Whether there is code for these laws. logits: None where they are not those of the laws, or not all there."""
        return logits is not None and not params.needs_filter and logits.dtype in _DTYPES

    def verify(
        self, tree: DraftTree, logits: Tensor, params: LawParams, uniforms: Tensor, laws: DepthLaws | None
    ) -> Verified:
        """As `specroll_core.verify.verify`. logits: [B N, V]."""
        B, N = tree.tokens.shape
        levels = tree.depth + 1
        held = [
            x.contiguous()
            for x in (
                logits, params.temperature.float(), tree.tokens, tree.parents, tree.valid, tree.sampled,
                tree.slot_mass, uniforms[:, :levels],
            )
        ]  # fmt: skip
        rows, temperature, tokens, parents, valid, sampled, mass, drawn = held
        assert rows.shape[0] == B * N
        assert mass.dtype == drawn.dtype == torch.float64
        assert tokens.dtype == parents.dtype == torch.int64
        q = ids = inverse = None
        if laws is not None and tree.any_sampled:
            q = laws.probs.contiguous()
            assert q.dtype == torch.float32
            ids, inverse = laws.vocabulary.ids, laws.vocabulary.inverse
        out_tokens, out_nodes = torch.full((2, B, levels), -1).unbind()
        logprobs = torch.zeros(B, levels)
        lengths = torch.empty(B, dtype=torch.int64)
        child_probs, accept, remainder = torch.full((3, B, N), torch.nan).unbind()
        self._call(
            rows.dtype == torch.bfloat16,
            rows.data_ptr(),
            rows.shape[1],
            *(x.data_ptr() for x in (temperature, tokens, parents, valid, sampled, mass)),
            *(None if x is None else x.data_ptr() for x in (q, ids, inverse)),
            0 if q is None else q.shape[1],
            0 if q is None else q.shape[2],
            drawn.data_ptr(),
            B,
            N,
            levels,
            *(x.data_ptr() for x in (out_tokens, out_nodes, logprobs, lengths, child_probs, accept, remainder)),
            torch.get_num_threads(),
        )
        return Verified(
            tokens=out_tokens,
            logprobs=logprobs,
            lengths=lengths,
            nodes=out_nodes,
            child_probs=child_probs,
            slot_accept=accept,
            slot_remainder=remainder,
        )


@functools.cache
def load() -> NativeWalk | None:
    """None where it cannot be compiled here."""
    code = library("tree_walk")
    return None if code is None else NativeWalk(code)
