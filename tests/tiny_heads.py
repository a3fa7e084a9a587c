"""Heads for the tiny model, trained for a few seconds on what it continues given prompts with.

A random model is hard to guess in general. Heads that know some of its texts by heart have long drafts accepted
there, and short ones elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from services.rollout.heads_file import save_heads
from specroll_core.head_training import HeadRows, HeadTrainConfig, train_heads
from specroll_core.heads import FutureTokenHeads, HeadsSpec

_TOKENS, _SAMPLES, _TOP = 64, 12, 64


def make_tiny_heads(model, prompts: Sequence[Sequence[int]], path: Path, *, heads: int = 4) -> Path:
    """Writes `heads` heads for a tiny `transformers` model.

    The last of them is noise: a proposer that is wrong and sure of it.
    """
    torch.manual_seed(0)
    texts = []
    for prompt in prompts:
        start = torch.tensor([prompt])
        texts.append(_continue(model, start, do_sample=False).expand(_SAMPLES, -1))
        texts.append(_continue(model, start.expand(_SAMPLES, -1), do_sample=True, temperature=0.9, top_k=4))
    rows = _rows(model, texts)
    made = FutureTokenHeads(HeadsSpec(heads, model.config.hidden_size, 128, model.config.vocab_size))
    config = HeadTrainConfig(epochs=10, learning_rate=1e-2, batch_rows=128)
    weight, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    train_heads(made, rows, weight, embedding, config)
    with torch.no_grad():
        made.up[-1].normal_(std=2.0)
    save_heads(made, path)
    return path


def _continue(model, start: torch.Tensor, **how) -> torch.Tensor:
    return model.generate(start, max_new_tokens=_TOKENS, eos_token_id=None, pad_token_id=0, **how)


@torch.no_grad()
def _rows(model, texts: Sequence[torch.Tensor]) -> HeadRows:
    parts, sequence = [], []
    for text in texts:
        hidden = model(text, output_hidden_states=True).hidden_states[-1]
        top = torch.log_softmax(hidden @ model.get_output_embeddings().weight.T, -1).topk(_TOP)
        for row in range(len(text)):
            parts.append((text[row, 1:], hidden[row, :-1], top.indices[row, :-1], top.values[row, :-1]))
            sequence.append(torch.full((text.shape[1] - 1,), len(sequence)))
    tokens, hidden, ids, logprobs = (torch.cat(part) for part in zip(*parts, strict=True))
    return HeadRows(tokens, hidden, ids, logprobs, torch.cat(sequence), torch.cat(sequence))
