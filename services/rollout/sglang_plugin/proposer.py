"""Heads beside the running model: from the state before the pending token to ranked candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from services.rollout.sglang_plugin.served_vocabulary import ServedVocabulary
from specroll_core.heads import FutureTokenHeads
from specroll_core.law import LawParams
from specroll_core.proposal import Proposal, propose_from_logits


class HeadProposer:
    """The serving copy of the heads, in the model's type, and the model's own embedding and LM head.

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

    def propose(
        self,
        hidden: Tensor,
        pending: Tensor,
        params: LawParams,
        vocabulary: ServedVocabulary,
        width: int,
        with_laws: bool,
    ) -> Proposal:
        """hidden: [B, H], the states before the pending tokens; pending: [B] int64; width: candidates per depth."""
        embedding = self._model.get_embed_and_head()[0]
        z = self.heads(hidden, embedding[pending])
        columns = vocabulary.current()
        return propose_from_logits(columns.logits(z), params, columns, width=width, with_laws=with_laws)
