"""What a request keeps between two rounds, in buffers of the worker indexed by the request's row in SGLang's pool.

A row passes from one request to the next without notice: every prefill writes it anew, the prefill after a retraction
too. Of a prompt that is computed in chunks the last chunk's values stay.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RequestSlots:
    """pending: [rows] int64, the token that is sampled but not yet in the KV cache.

    hidden: [rows, H], the target's last hidden state before it, whose law it was drawn from.
    """

    def __init__(self, rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.pending = torch.zeros(rows, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(rows, hidden_size, dtype=dtype, device=device)

    def store(self, rows: Tensor, pending: Tensor, hidden: Tensor) -> None:
        """rows: [B] int64; pending: [B]; hidden: [B, H]."""
        assert hidden.shape == (rows.shape[0], self.hidden.shape[1]), (hidden.shape, rows.shape)
        self.pending[rows] = pending.to(torch.int64)
        self.hidden[rows] = hidden.to(self.hidden.dtype)
