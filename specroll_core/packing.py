"""Laying completions out as rows of one forward pass.

Two layouts give the same log-probabilities and gradients:

*shared*: one row per group, `[prompt, c_1, .., c_G]`. Position ids restart after the prompt for every completion and a
4-D mask lets completion i see the prompt and itself, so that the prompt is computed once and not G times.

*padded*: one row per completion, `[prompt, c_i]`, padded on the right. The causal mask alone is right there (padding
comes after everything that is read), which keeps attention on its fast path without a mask.

A completion's last token is never an input: nothing is predicted from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["shared", "padded"]


@dataclass(frozen=True, slots=True)
class PromptCompletions:
    """One prompt and those of its completions that are trained on."""

    prompt_ids: Sequence[int]
    completions: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Rows for one forward pass, and where its predictions are. All on the CPU until `to`.

    input_ids, position_ids: int64 [R, L]. attention_mask: bool [R, 1, L, L] where True may be seen, or None for plain
    causal attention. S completions in the order in which they were given, T tokens in the longest:
    hidden_index: int64 [P], positions of the flattened [R * L] hidden states that predict something, each once.
    token_row: int64 [N], for each completion token its row in `hidden_index`. token_ids: int64 [N].
    slot: int64 [N], its place in a flattened [S * T] matrix. mask: bool [S, T], true where there is a token.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    hidden_index: Tensor
    token_row: Tensor
    token_ids: Tensor
    slot: Tensor
    mask: Tensor

    def to(self, device: torch.device | str) -> PackedBatch:
        return PackedBatch(
            self.input_ids.to(device),
            self.position_ids.to(device),
            None if self.attention_mask is None else self.attention_mask.to(device),
            self.hidden_index.to(device),
            self.token_row.to(device),
            self.token_ids.to(device),
            self.slot.to(device),
            self.mask.to(device),
        )

    def scatter(self, values: Tensor) -> Tensor:
        """[N] values of the completion tokens as a matrix [S, T], 0 where there is no token; differentiable."""
        return values.new_zeros(self.mask.numel()).index_put((self.slot,), values).view(self.mask.shape)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass. samples[s]: the place of completion s in the order of the whole batch."""

    packed: PackedBatch
    samples: tuple[int, ...]


def plan(
    groups: Sequence[PromptCompletions],
    micro_batch_groups: int,
    *,
    hidden_size: int,
    layer_params: int,
    layout: Layout | None = None,
    pad_id: int = 0,
) -> list[MicroBatch]:
    """Cuts a batch into micro-batches of about `micro_batch_groups` groups each.

    The cheaper layout is chosen for each group unless `layout` names one. Shared rows are sorted by their length, and
    padded rows are sorted over all groups, so that little is padded. Samples are numbered group by group.
    hidden_size: of the model. layer_params: parameters of the linear layers of one block.
    """
    shared: list[tuple[PromptCompletions, list[int]]] = []
    padded: list[tuple[PromptCompletions, list[int]]] = []
    number = 0
    for group in groups:
        numbers = list(range(number, number + len(group.completions)))
        number += len(numbers)
        if (layout or choose_layout(group, hidden_size, layer_params)) == "shared":
            shared.append((group, numbers))
        else:
            padded.extend(
                (PromptCompletions(group.prompt_ids, (completion,)), [sample])
                for completion, sample in zip(group.completions, numbers, strict=True)
            )
    most = max((len(g.completions) for g in groups), default=1)
    micro_batches = []
    for units, size, kind in ((shared, micro_batch_groups, "shared"), (padded, micro_batch_groups * most, "padded")):
        units.sort(key=lambda unit: _shared_length(unit[0]), reverse=True)
        for start in range(0, len(units), size):
            chunk = units[start : start + size]
            packed = pack([unit for unit, _ in chunk], "shared" if kind == "shared" else "padded", pad_id)
            micro_batches.append(MicroBatch(packed, tuple(n for _, numbers in chunk for n in numbers)))
    return micro_batches


def choose_layout(group: PromptCompletions, hidden_size: int, layer_params: int) -> Layout:
    """The layout that costs this group fewer multiplications.

    A token costs `layer_params` in the linear layers of a block and `2 * hidden_size` per column in its attention.
    A shared row pays attention over its whole length, as masked columns are computed too; padded rows over their own,
    and half of it, as causal attention skips what is above the diagonal. Sharing wins where the prompt is long or the
    completions are short; padded rows win for long completions.
    """
    length = _shared_length(group)
    shared = length * (layer_params + 2 * hidden_size * length)
    lengths = [len(group.prompt_ids) + len(c) - 1 for c in group.completions]
    padded = sum(n * (layer_params + hidden_size * n) for n in lengths)
    return "shared" if shared <= padded else "padded"


def _shared_length(group: PromptCompletions) -> int:
    return len(group.prompt_ids) + sum(len(c) - 1 for c in group.completions)


def pack(groups: Sequence[PromptCompletions], layout: Layout, pad_id: int = 0) -> PackedBatch:
    """Lays the groups out. Every completion has at least one token and every prompt too (the contracts see to it)."""
    assert groups
    assert all(g.prompt_ids and g.completions and all(g.completions) for g in groups)
    return _pack_shared(groups, pad_id) if layout == "shared" else _pack_padded(groups, pad_id)


def _pack_shared(groups: Sequence[PromptCompletions], pad_id: int) -> PackedBatch:
    length = max(map(_shared_length, groups))
    input_ids = torch.full((len(groups), length), pad_id, dtype=torch.int64)
    position_ids = torch.zeros((len(groups), length), dtype=torch.int64)
    # segment 0 is the prompt, i the i-th completion; padding has segments of its own, so that it sees at least itself:
    # a row of the mask without any column would make the softmax NaN.
    segment = torch.full((len(groups), length), -1, dtype=torch.int64)
    predictors: list[list[int]] = []
    for row, group in enumerate(groups):
        prompt = len(group.prompt_ids)
        input_ids[row, :prompt] = torch.tensor(group.prompt_ids)
        position_ids[row, :prompt] = torch.arange(prompt)
        segment[row, :prompt] = 0
        at = prompt
        for number, completion in enumerate(group.completions, start=1):
            end = at + len(completion) - 1
            input_ids[row, at:end] = torch.tensor(completion[:-1], dtype=torch.int64)
            position_ids[row, at:end] = torch.arange(prompt, prompt + end - at)
            segment[row, at:end] = number
            predictors.append([row * length + prompt - 1, *range(row * length + at, row * length + end)])
            at = end
    causal = torch.ones((length, length), dtype=torch.bool).tril()
    same_or_prompt = (segment.unsqueeze(2) == segment.unsqueeze(1)) | (segment.unsqueeze(1) == 0)
    return _finish(groups, input_ids, position_ids, (causal & same_or_prompt).unsqueeze(1), predictors)


def _pack_padded(groups: Sequence[PromptCompletions], pad_id: int) -> PackedBatch:
    rows = [[*g.prompt_ids, *c[:-1]] for g in groups for c in g.completions]
    length = max(map(len, rows))
    input_ids = torch.full((len(rows), length), pad_id, dtype=torch.int64)
    for row, ids in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
    position_ids = torch.arange(length).expand(len(rows), length)
    prompts = [len(g.prompt_ids) for g in groups for _ in g.completions]
    predictors = [
        list(range(row * length + prompt - 1, row * length + len(ids)))
        for row, (prompt, ids) in enumerate(zip(prompts, rows, strict=True))
    ]
    return _finish(groups, input_ids, position_ids, None, predictors)


def _finish(
    groups: Sequence[PromptCompletions],
    input_ids: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None,
    predictors: list[list[int]],
) -> PackedBatch:
    """predictors[s][t]: the flat position whose hidden state predicts token t of completion s."""
    completions = [c for g in groups for c in g.completions]
    longest = max(map(len, completions))
    flat = torch.tensor([p for ps in predictors for p in ps])
    hidden_index, token_row = flat.unique(return_inverse=True)
    mask = torch.arange(longest) < torch.tensor([len(c) for c in completions]).unsqueeze(1)
    return PackedBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=attention_mask,
        hidden_index=hidden_index,
        token_row=token_row,
        token_ids=torch.tensor([t for c in completions for t in c]),
        slot=mask.flatten().nonzero().squeeze(1),
        mask=mask,
    )
