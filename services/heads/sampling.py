"""Samples completions in batches and keeps, of every token, the hidden state and the law that it was drawn from.

A loop of its own in place of `generate`, for speed on CPUs: a prompt is read once for all of its completions; keys and
values are written into place, where `generate` copies all of them in every step; tokens are drawn by inverting the
cumulative law, since drawing exponentials for a whole vocabulary costs 1.9 ms a row; finished rows leave the batch.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from services.heads.target import TargetModel
from specroll_core.contracts import SamplingParams
from specroll_core.law import LawParams, final_logprobs, sample

# Tokens of each law that are kept; beyond them lies little mass to learn from.
TOP = 32
# Rows whose laws are made at one time: 3 MB of float32 for a vocabulary of 49,152. What is much larger is mapped and
# zeroed by the system anew each time, which costs ten times what is computed on it.
_LAW_ROWS = 16
# The batch is made smaller once so many of its rows have ended.
_ENDED = 0.25
# Positions by which keys and values grow; all of them are read in every step.
_ROOM = 32
# Completions are searched for stop strings every so many steps; what lies beyond one is cut off at the end.
_STOP_EVERY = 8


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of n tokens, on the CPU, the token that ends it included.

    tokens: [n] int64; hidden: [n, H], the state before each; ids: [n, C] int64 and logprobs: [n, C] float32, the most
    likely tokens of the law at temperature 1. prompt, law: positions in what was asked for.
    """

    tokens: Tensor
    hidden: Tensor
    ids: Tensor
    logprobs: Tensor
    prompt: int
    law: int


class RoomyLayer(DynamicLayer):
    """Keys and values [B, K, T, D] of one layer, written into place. They are handed out whole, since products of a
    part would copy it: the mask hides what is not written yet, and is made for the length that is told here."""

    def __init__(self) -> None:
        super().__init__()
        self._length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            self._length = key_states.shape[2]
            return self.keys, self.values
        start, end = self._length, self._length + key_states.shape[2]
        room = self.get_mask_sizes(key_states.shape[2])[0] - self.keys.shape[2]
        if room:
            self.keys, self.values = F.pad(self.keys, (0, 0, 0, room)), F.pad(self.values, (0, 0, 0, room))
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self._length = end
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if not self.is_initialized:
            return query_length, 0
        needed, there = self._length + query_length, self.keys.shape[2]
        return (there if needed <= there else needed + _ROOM - 1), 0

    def get_seq_length(self) -> int:
        return self._length


@torch.inference_mode()
def complete(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    laws: Sequence[SamplingParams],
    generator: torch.Generator,
    progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """One completion of each prompt under each law, which share their stop strings and their longest length.

    progress(n) is called after each step with the tokens so far. generator: of the CPU, for the draws.
    """
    device, room = target.device, laws[0].max_new_tokens
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), target.pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    cache = DynamicCache(config=target.model.config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    hidden = _states(target, ids, mask, cache)[:, -1]

    cache.batch_repeat_interleave(len(laws))
    hidden = hidden.repeat_interleave(len(laws), 0)
    mask = torch.cat([mask.repeat_interleave(len(laws), 0), mask.new_ones(len(hidden), room)], 1)
    params = LawParams.from_requests(list(laws) * len(prompts), device)
    stops = torch.tensor(target.stop_ids, device=device)
    rows = torch.arange(len(hidden), device=device)  # completions that the batch still holds
    alive = torch.ones(len(hidden), dtype=torch.bool, device=device)
    steps: list[tuple[Tensor, ...]] = []
    texts: list[list[int]] = [[] for _ in rows]
    done = 0
    for step in range(room):
        drawn, best, logprobs = _draw(F.linear(hidden, target.lm_head), params, generator)
        steps.append(tuple(x[alive].cpu() for x in (rows, drawn, hidden, best, logprobs)))
        done += len(steps[-1][0])
        if progress is not None:
            progress(done)
        alive &= ~torch.isin(drawn, stops)
        if laws[0].stop:
            for row, token in zip(*(x.tolist() for x in steps[-1][:2]), strict=True):
                texts[row].append(token)
            if step % _STOP_EVERY == _STOP_EVERY - 1:
                alive &= torch.tensor([not _stopped(target, texts[row], laws[0].stop) for row in rows.tolist()]).to(
                    device
                )
        left = int(alive.sum())
        if left == 0 or step + 1 == room:
            break
        if left <= (1 - _ENDED) * len(alive):
            kept = alive.nonzero().squeeze(1)
            cache.batch_select_indices(kept)
            rows, drawn, mask, alive, params = rows[kept], drawn[kept], mask[kept], alive[kept], params.select(kept)
        hidden = _states(target, drawn[:, None], mask[:, : width + step + 1], cache)[:, -1]
    made = _by_row(steps, len(prompts), len(laws))
    if laws[0].stop:
        lengths = [_length_to_stop(target, one.tokens.tolist(), laws[0].stop) for one in made]
        made = [_cut(one, length) for one, length in zip(made, lengths, strict=True)]
    return made


def _states(target: TargetModel, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """[B, L, H]: the states of `ids` [B, L], the last positions of `mask` [B, T]."""
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    out = target.model.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
    )
    return out.last_hidden_state


def _draw(logits: Tensor, params: LawParams, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """logits: [B, V]. Returns the tokens drawn [B] int64, and the best tokens [B, C] int64 with their log-probabilities
    at temperature 1."""
    uniforms = torch.rand(len(logits), generator=generator, dtype=torch.float64).to(logits.device)
    tokens, ids, logprobs = [], [], []
    for rows in torch.arange(len(logits), device=logits.device).split(_LAW_ROWS):
        some = logits[rows]
        top = some.topk(min(TOP, some.shape[1]))
        at_one = some.float().log_softmax(-1)
        law = params.select(rows)
        plain = not (law.needs_filter or law.any_scaled or law.any_greedy)
        tokens.append(sample((at_one if plain else final_logprobs(some, law)).exp(), uniforms[rows]))
        ids.append(top.indices)
        logprobs.append(at_one.gather(1, top.indices))
    return torch.cat(tokens), torch.cat(ids), torch.cat(logprobs)


def _by_row(steps: Sequence[tuple[Tensor, ...]], prompts: int, laws: int) -> list[Completion]:
    rows, *columns = (torch.cat(column) for column in zip(*steps, strict=True))
    order = rows.sort(stable=True).indices
    lengths = rows.bincount(minlength=prompts * laws).tolist()
    tokens, hidden, ids, logprobs = (column[order].split(lengths) for column in columns)
    return [
        Completion(tokens[row], hidden[row], ids[row], logprobs[row], row // laws, row % laws)
        for row in range(prompts * laws)
    ]


def _stopped(target: TargetModel, ids: list[int], stops: Sequence[str]) -> bool:
    text = target.tokenizer.decode(ids, skip_special_tokens=False)
    return any(stop in text for stop in stops)


def _length_to_stop(target: TargetModel, ids: list[int], stops: Sequence[str]) -> int:
    """Tokens up to the one that completes the first stop string."""
    found = bisect.bisect_left(range(1, len(ids) + 1), True, key=lambda n: _stopped(target, ids[:n], stops))
    return min(len(ids), found + 1)


def _cut(one: Completion, length: int) -> Completion:
    return Completion(
        one.tokens[:length], one.hidden[:length], one.ids[:length], one.logprobs[:length], one.prompt, one.law
    )
