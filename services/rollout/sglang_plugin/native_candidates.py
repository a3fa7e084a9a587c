"""`native/candidates.cpp`: what `specroll_core.proposal.propose_from_logits` returns, without filters."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from services.rollout.sglang_plugin.native_code import library
from specroll_core.heads import ProposalVocabulary
from specroll_core.law import LawParams
from specroll_core.proposal import DEFAULT_WIDTH, DepthLaws, Proposal, propose_from_logits

_DTYPES = (torch.bfloat16, torch.float32)


class NativeCandidates:
    """The compiled function, and where it writes laws. Use `load`."""

    def __init__(self, code: ctypes.CDLL) -> None:
        self._call = code.specroll_candidates
        i, p, w = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
        self._call.argtypes = [i, p, w, w, w, p, p, w, p, p, p, i]
        self._call.restype = None
        self._laws = torch.empty(0)

    def propose(
        self,
        logits: Tensor,
        params: LawParams,
        vocabulary: ProposalVocabulary,
        *,
        width: int = DEFAULT_WIDTH,
        with_laws: bool = True,
    ) -> Proposal:
        """As `propose_from_logits`. The laws are good until the next call: fresh pages for them, a megabyte and more,
        take longer than all else here."""
        if logits.dtype not in _DTYPES:
            return propose_from_logits(logits, params, vocabulary, width=width, with_laws=with_laws)
        B, K, M = logits.shape
        assert params.rows == B
        width = min(width, M)
        if self._laws.numel() < logits.numel():
            self._laws = torch.empty(logits.numel())
        laws = self._laws[: logits.numel()].view(B, K, M)
        rows, temperature = logits.contiguous(), params.temperature.float().contiguous()
        tokens, log_q = torch.empty(B, K, width, dtype=torch.int64), torch.empty(B, K, width)
        ids = vocabulary.ids
        self._call(
            rows.dtype == torch.bfloat16,
            rows.data_ptr(),
            B,
            K,
            M,
            temperature.data_ptr(),
            None if ids is None else ids.data_ptr(),
            width,
            laws.data_ptr(),
            tokens.data_ptr(),
            log_q.data_ptr(),
            torch.get_num_threads(),
        )
        return Proposal(tokens, log_q, DepthLaws(laws, vocabulary) if with_laws else None)


def load() -> NativeCandidates | None:
    """None where it cannot be compiled here."""
    code = library("candidates")
    return None if code is None else NativeCandidates(code)
