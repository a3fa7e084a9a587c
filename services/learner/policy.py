"""The model that is trained: log-probabilities of completion tokens under the law that sampled them, and saving."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig

from services.learner import attention
from specroll_core.contracts import SamplingParams
from specroll_core.law import LawParams, token_logprobs
from specroll_core.packing import Layout, PackedBatch
from specroll_core.token_logprobs import linear_token_logprobs

# Bound of the memory for one chunk of logits. 256 MiB are 2,730 tokens of SmolLM2 in bfloat16 or 440 of a vocabulary
# of 152k in float32. A law with filters needs about four more matrices of this size, in float32, for the same chunk.
LOGIT_BYTES = 256 * 2**20

# What turns hidden states into logits beside the LM head, by the name in the model's configuration.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")

# Copied from the source's directory, byte for byte.
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.tiktoken",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """float32 [S, T], 0 where there is no token. entropy: of the law that the token was drawn from, in nats, without
    gradient; None where the law has filters (its entropy would cost another pass over the vocabulary)."""

    logprobs: Tensor
    entropy: Tensor | None


class Policy:
    """A causal language model of the Hugging Face kind on one device, in one dtype.

    layout: the only one that fits the model, None where any does. The model stays in evaluation mode: dropout would
    make it another law than the one that is served.
    Raises ValueError where the model's logits are more than a linear function of its hidden states.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.model_dir = Path(model_dir)
        self.device = device
        self.model = AutoModelForCausalLM.from_pretrained(
            self.model_dir, dtype=dtype, attn_implementation=attention.register()
        )
        self.model.to(device).eval()
        for name in _LOGIT_TRANSFORMS:
            if getattr(self.model.config, name, None) not in (None, 1, 1.0):
                raise ValueError(
                    f"model.source: {self.model.config.model_type} transforms its logits ({name}), which the learner "
                    "cannot recompute; take a model without it."
                )
        # A mask of our own would replace a sliding window, and a recurrent layer knows no mask at all.
        self.layout: Layout | None = None if _attends_to_everything(self.model.config) else "padded"
        self.head = self.model.get_output_embeddings()
        self.hidden_size: int = self.model.config.hidden_size
        self.pad_id: int = self.model.config.pad_token_id or 0
        blocks = [p for name, p in self.model.named_parameters() if p.dim() >= 2 and ".layers." in name]
        self.layer_params = sum(p.numel() for p in blocks) // max(1, self.model.config.num_hidden_layers)

    def token_logprobs(self, batch: PackedBatch, sampling: SamplingParams) -> TokenLogprobs:
        """Log-probabilities of the batch's completion tokens under `sampling`'s final law, with gradient where enabled.

        A token outside of the support (a filter cut it under the present weights) has -inf.
        """
        batch = batch.to(self.device)
        hidden = self._hidden_states(batch)
        hidden = hidden.reshape(-1, hidden.shape[-1])[batch.hidden_index]
        filtered = sampling.top_k != -1 or sampling.top_p < 1 or sampling.min_p > 0
        if filtered or self.head.bias is not None:
            values = self._filtered_logprobs(hidden, batch, sampling)
            return TokenLogprobs(batch.scatter(values), None)
        values, entropy = linear_token_logprobs(
            hidden, self.head.weight, batch.token_row, batch.token_ids, sampling.temperature, LOGIT_BYTES
        )
        return TokenLogprobs(batch.scatter(values), batch.scatter(entropy))

    def save_policy(self, directory: Path) -> None:
        """Writes a Hugging Face directory: weights in the model's dtype, and the source's tokenizer, chat template and
        generation settings as they are. `transformers` loads it."""
        directory.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(directory)
        for pattern in _TOKENIZER_FILES:
            for file in self.model_dir.glob(pattern):
                shutil.copyfile(file, directory / file.name)

    def _hidden_states(self, batch: PackedBatch) -> Tensor:
        """[R, L, H] float32: what the LM head reads.

        The residual stream is in float32 also where weights and products are in bfloat16: rounding it at every layer
        is the larger part of the difference to an engine, and costs nothing to leave out.
        """
        low = self.model.dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.model.dtype, enabled=low):
            output = self.model.base_model(
                inputs_embeds=self.model.get_input_embeddings()(batch.input_ids).float(),
                attention_mask=batch.attention_mask,
                # Positions of padded rows are the default ones; said aloud they would be searched for packed sequences.
                position_ids=None if batch.attention_mask is None else batch.position_ids,
                use_cache=False,
            )
        return output.last_hidden_state.float()

    def _filtered_logprobs(self, hidden: Tensor, batch: PackedBatch, sampling: SamplingParams) -> Tensor:
        """[N] log-probabilities under a law with filters, in chunks that are computed again in the backward pass."""
        weight, bias = self.head.weight, self.head.bias
        rows = max(1, LOGIT_BYTES // (4 * weight.shape[0]))
        chunk = partial(_chunk_logprobs, sampling=sampling)
        values = []
        for start in range(0, batch.token_row.shape[0], rows):
            states = hidden[batch.token_row[start : start + rows]]
            tokens = batch.token_ids[start : start + rows]
            if rows < batch.token_row.shape[0] and torch.is_grad_enabled():
                values.append(checkpoint(chunk, states, weight, bias, tokens, use_reentrant=False))
            else:
                values.append(chunk(states, weight, bias, tokens))
        return torch.cat(values)


def _attends_to_everything(config: PretrainedConfig) -> bool:
    if getattr(config, "layer_types", None):
        return set(config.layer_types) == {"full_attention"}
    return not (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True))


def _chunk_logprobs(
    states: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, sampling: SamplingParams
) -> Tensor:
    law = LawParams.from_requests([sampling] * states.shape[0], device=str(states.device))
    return token_logprobs(F.linear(states.to(weight.dtype), weight, bias), tokens, law)
