"""The serving copy of the heads, beside the running model."""

from __future__ import annotations

import torch
from torch import Tensor

from specroll_core.heads import FutureTokenHeads


class HeadProposer:
    """Heads in the model's type, and the model's own embedding.

    The model's weights are looked up at every call: a policy update may replace the tensors as well as their values.
    """

    def __init__(self, model, heads: FutureTokenHeads, dtype: torch.dtype, device) -> None:
        if not hasattr(model, "get_embed_and_head"):
            raise ValueError(
                f"rollout.engine.speculation cannot serve {type(model).__name__}: SGLang's class offers no "
                "get_embed_and_head."
            )
        self.heads = FutureTokenHeads(heads.spec, dtype=dtype, device=device)
        self.heads.load_in_place(heads.state_dict())
        self.heads.requires_grad_(False)
        self._model = model

    @property
    def depth(self) -> int:
        return self.heads.spec.heads

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: [B] int64. Returns [B, H]."""
        embedded: Tensor = self._model.get_embed_and_head()[0][tokens]
        return embedded
