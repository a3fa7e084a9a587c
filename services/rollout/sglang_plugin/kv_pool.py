"""The key-value pool on a CPU: SGLang's own without its Triton kernels."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class TorchKVPool(MHATokenToKVPool):
    def _init_kv_copy_and_warmup(self) -> None:
        """The parent compiles a Triton kernel here."""


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,  # noqa: ARG001 (SGLang's signature)
) -> None:
    """Writes each request's new slots into its row of the slot table, without SGLang's Triton kernel.

    req_pool_indices, start_offset, end_offset: [B]; out_cache_loc: the new slots of all requests, one after
    the other; req_to_token: [requests, context] int32, row r columns [start, end) are written.
    """
    at = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start
