"""The target model, for sampling and for reading what heads learn from: its last hidden states and its laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.heads import decode_attention
from services.heads.fingerprint import ModelFingerprint


class TargetModel:
    """A causal language model of the Hugging Face kind in evaluation mode.

    lm_head, embedding: [V, H] in the model's dtype. stop_ids: tokens that end a completion, ascending.
    Raises ValueError where the logits are more than the product of hidden state and LM head: heads share that product.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        self.directory = directory
        self.device = device
        self.fingerprint = ModelFingerprint.of(directory)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=decode_attention.register()
        )
        self.model.to(device).eval()
        self.output: torch.nn.Module = self.model.get_output_embeddings()
        self.lm_head: Tensor = self.output.weight.detach()
        self.embedding: Tensor = self.model.get_input_embeddings().weight.detach()
        given = self.model.generation_config
        stops = {self.tokenizer.eos_token_id, *_as_list(given.eos_token_id)} - {None}
        self.stop_ids: tuple[int, ...] = tuple(sorted(stops))
        self.pad_id: int = next(
            i for i in (given.pad_token_id, self.tokenizer.pad_token_id, *stops, 0) if i is not None
        )
        # The directory's own settings (penalties, a top-p) would change the law behind the configuration's back.
        self.model.generation_config = GenerationConfig(eos_token_id=list(self.stop_ids), pad_token_id=self.pad_id)
        self._check_that_logits_are_a_product()

    @torch.inference_mode()
    def hidden_states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids, mask: [B, L], padded on the right. Returns [B, L, H], what the LM head reads."""
        return self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state

    @torch.inference_mode()
    def _check_that_logits_are_a_product(self) -> None:
        ids = torch.full((1, 1), self.pad_id, device=self.device)
        product = F.linear(self.hidden_states(ids, torch.ones_like(ids)), self.lm_head)
        if not torch.allclose(self.model(ids).logits.float(), product.float(), rtol=0.02, atol=0.02):
            raise ValueError(
                f"model.source: {self.model.config.model_type} transforms its logits behind the LM head, so heads that "
                "share it cannot be trained; take a model without that."
            )


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]
