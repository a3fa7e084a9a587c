"""The exact laws: one forward pass of the reference model over texts that the engine has sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.heads.target import TargetModel

# Tokens of one forward pass; more would only cost memory.
_FORWARD_TOKENS = 2048
# Rows of the LM head that exist in float32 at one time, where it is kept in another type.
_VOCABULARY_ROWS = 16_384


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what was sampled after it. name: the caller's."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    name: int

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)


def hidden_states(target: TargetModel, texts: Sequence[Text]) -> Iterator[tuple[Text, Tensor]]:
    """Each text, shortest first, with the states [n + 1, H] of its n tokens: row i is what token i was drawn from, and
    the last one what would come next."""
    for batch in _batches(sorted(texts, key=len)):
        width = max(map(len, batch))
        ids = torch.full((len(batch), width), target.pad_id)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(batch):
            ids[row, : len(text)] = torch.tensor([*text.prompt, *text.tokens])
            mask[row, : len(text)] = 1
        states = target.hidden_states(ids.to(target.device), mask.to(target.device))
        for row, text in enumerate(batch):
            yield text, states[row, len(text.prompt) - 1 : len(text)]


def logits_of(target: TargetModel, states: Tensor) -> Tensor:
    """[n, V] float32, as a float32 product: logits of 20 have a step of 0.125 in bfloat16."""
    return torch.cat([F.linear(states.float(), rows.float()) for rows in target.lm_head.split(_VOCABULARY_ROWS)], -1)


def _batches(texts: Sequence[Text]) -> Iterator[list[Text]]:
    batch: list[Text] = []
    for text in texts:
        if batch and len(text) * (len(batch) + 1) > _FORWARD_TOKENS:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch
