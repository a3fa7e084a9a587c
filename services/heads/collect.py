"""Rows to train heads on: positions of the model's own rollouts, or of given texts.

A row is a token with the hidden state that it was drawn from and the most likely tokens of that law. Rollouts give
both while they are sampled: what the LM head read and answered at each step is kept, so that the model is not run a
second time. Given texts are read by one forward pass.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from services.config import DataConfig
from services.heads.target import TargetModel
from services.learner.sources import DataError, load_rows
from specroll_core.contracts import SamplingParams
from specroll_core.head_training import HeadRows

# Tokens of each law that are kept; beyond them lies little mass to learn from.
TOP = 32
# Sampled together. A step's cost is mostly reading the weights; beyond this a CPU gains nothing.
BATCH = 64
# Positions whose logits exist at one time: 200 MB in float32 for a vocabulary of 200,000.
_LOGIT_ROWS = 256
# Tokens of one forward pass over texts.
_FORWARD_TOKENS = 8192

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one trajectory, on the CPU."""

    tokens: Tensor
    hidden: Tensor
    ids: Tensor
    logprobs: Tensor
    prompt: int


def sample_rows(
    target: TargetModel,
    prompts: Sequence[tuple[int, ...]],
    law: SamplingParams,
    *,
    tokens: int | None = None,
    seed: int = 0,
    batch: int = BATCH,
    progress: Progress | None = None,
) -> HeadRows:
    """Samples completions of `prompts`, in their order and over again as often as needed, until they hold `tokens`
    tokens; one completion of each prompt where tokens is None. The token that ends a completion is a row too.

    The rows lie on the target's device. `HeadRows.prompt` is the position in `prompts`. progress(done) is called after
    each step with the tokens so far.
    """
    parts: list[_Part] = []
    done, begun = 0, 0
    with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(seed)
        while done < tokens if tokens is not None else begun < len(prompts):
            count = batch if tokens is None else _next_batch(tokens - done, done, begun, law.max_new_tokens, batch)
            if tokens is None:
                count = min(count, len(prompts) - begun)
            chosen = [(begun + i) % len(prompts) for i in range(count)]
            report = None if progress is None else lambda n, before=done: progress(before + n)
            parts += _sample(target, [prompts[i] for i in chosen], chosen, law, report)
            begun += count
            done = sum(len(part.tokens) for part in parts)
    return _join(parts, target.device)


def text_rows(
    target: TargetModel,
    texts: Sequence[Sequence[int]],
    *,
    progress: Progress | None = None,
) -> HeadRows:
    """Rows of given texts as token ids, each a prompt of its own. Row i is the i + 1st token of a text: the first has
    no law. Texts of one token are left out. progress(done) is called with the rows so far."""
    parts: list[_Part] = []
    for batch in _batches(texts):
        parts += _read(target, batch)
        if progress is not None:
            progress(sum(len(part.tokens) for part in parts))
    if not parts:
        raise ValueError("--texts must hold at least one text of two tokens.")
    return _join(parts, target.device)


def read_texts(path: Path, target: TargetModel, *, longest: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Texts as token ids, in a shuffled order, until they hold `tokens` tokens beside each one's first.

    path: a .jsonl, .json, .csv or .parquet file with a column `text`. longest: tokens that are kept of a text.
    Raises DataError.
    """
    if path.suffix.lower() not in (".jsonl", ".json", ".csv", ".parquet"):
        raise DataError(f"--texts {path} must be a .jsonl, .json, .csv or .parquet file.")
    try:
        rows = load_rows(DataConfig(source=str(path), size=max(1, tokens)), seed=0)
    except DataError as error:
        raise DataError(str(error).replace("data.source = ", "--texts ")) from error
    texts = [row.get("text") for row in rows]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"--texts {path} must have a column 'text' that holds text in every row.")
    random.Random(seed).shuffle(texts)  # noqa: S311
    found: list[list[int]] = []
    for text in texts:
        if tokens <= 0:
            break
        found.append(target.tokenizer(text)["input_ids"][:longest])
        tokens -= max(0, len(found[-1]) - 1)
    return found


def _next_batch(missing: int, done: int, begun: int, longest: int, batch: int) -> int:
    """Completions that bring about `missing` tokens at the mean length so far."""
    mean = done / begun if begun else longest
    return max(1, min(batch, math.ceil(missing / mean)))


@torch.inference_mode()
def _sample(
    target: TargetModel,
    prompts: Sequence[tuple[int, ...]],
    names: Sequence[int],
    law: SamplingParams,
    progress: Progress | None,
) -> list[_Part]:
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), target.pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    hidden: list[Tensor] = []
    top: list[tuple[Tensor, Tensor]] = []

    def keep(_module: torch.nn.Module, read: tuple[Tensor, ...], logits: Tensor) -> None:
        hidden.append(read[0][:, -1].cpu())
        top.append(_top(logits[:, -1]))
        if progress is not None:
            progress(len(hidden) * len(prompts))

    hook = target.output.register_forward_hook(keep)
    try:
        made = target.model.generate(
            input_ids=ids.to(target.device),
            attention_mask=mask.to(target.device),
            max_new_tokens=law.max_new_tokens,
            **_settings(law, target),
        )[:, width:].cpu()
    finally:
        hook.remove()
    assert len(hidden) == made.shape[1], "the LM head is read once per step"
    states, ids_, logprobs = torch.stack(hidden, 1), *(torch.stack(column, 1) for column in zip(*top, strict=True))
    stop = torch.isin(made, torch.tensor(target.stop_ids))
    # Up to and including the first stop token; what follows is padding.
    lengths = torch.where(stop.any(1), stop.int().argmax(1) + 1, made.shape[1]).tolist()
    if law.stop:
        texts = [made[row, :n].tolist() for row, n in enumerate(lengths)]
        lengths = [_length_to_stop(text, law.stop, target) for text in texts]
    return [
        _Part(made[row, :n].clone(), states[row, :n].clone(), ids_[row, :n].clone(), logprobs[row, :n].clone(), name)
        for row, (n, name) in enumerate(zip(lengths, names, strict=True))
    ]


def _length_to_stop(ids: list[int], stops: Sequence[str], target: TargetModel) -> int:
    """Tokens up to the one that completes the first stop string. Padding that follows may look like a stop token."""

    def complete(length: int) -> bool:
        text = target.tokenizer.decode(ids[:length], skip_special_tokens=False)
        return any(stop in text for stop in stops)

    return min(len(ids), bisect.bisect_left(range(1, len(ids) + 1), True, key=complete) + 1)


def _settings(law: SamplingParams, target: TargetModel) -> dict[str, object]:
    """`generate`'s names for a sampling law. What is off is said aloud: its defaults are not all off."""
    if law.temperature == 0:
        return {"do_sample": False, "top_k": None, "top_p": None, "temperature": None}
    settings: dict[str, object] = {
        "do_sample": True,
        "temperature": law.temperature,
        "top_p": law.top_p,
        "top_k": 0 if law.top_k == -1 else law.top_k,
        "min_p": law.min_p or None,
    }
    if law.stop:
        settings |= {"stop_strings": list(law.stop), "tokenizer": target.tokenizer}
    return settings


@torch.inference_mode()
def _read(target: TargetModel, batch: Sequence[tuple[int, Sequence[int]]]) -> list[_Part]:
    width = max(len(text) for _, text in batch)
    ids = torch.full((len(batch), width), target.pad_id)
    mask = torch.zeros_like(ids)
    for row, (_, text) in enumerate(batch):
        ids[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    states = target.hidden_states(ids.to(target.device), mask.to(target.device))
    parts = []
    for row, (name, text) in enumerate(batch):
        hidden = states[row, : len(text) - 1]
        top = [_top(F.linear(chunk, target.lm_head)) for chunk in hidden.split(_LOGIT_ROWS)]
        kept, logprobs = (torch.cat(column) for column in zip(*top, strict=True))
        parts.append(_Part(ids[row, 1 : len(text)].clone(), hidden.cpu().clone(), kept, logprobs, name))
    return parts


def _top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits: [n, V]. Returns ids [n, C] int64 and log-probabilities [n, C] float32 of the best, on the CPU;
    C is `TOP`, or V where that is less."""
    values, ids = logits.topk(min(TOP, logits.shape[-1]))
    return ids.cpu(), (values.float() - logits.float().logsumexp(-1, keepdim=True)).cpu()


def _batches(texts: Sequence[Sequence[int]]) -> Iterator[list[tuple[int, Sequence[int]]]]:
    """(position, text) in their order, so many at a time as one forward pass may hold with its padding."""
    batch: list[tuple[int, Sequence[int]]] = []
    for position, text in enumerate(texts):
        if len(text) < 2:
            continue
        longest = max([len(text), *(len(other) for _, other in batch)])
        if batch and longest * (len(batch) + 1) > _FORWARD_TOKENS:
            yield batch
            batch = []
        batch.append((position, text))
    if batch:
        yield batch


def _join(parts: Sequence[_Part], device: torch.device) -> HeadRows:
    lengths = torch.tensor([len(part.tokens) for part in parts])
    columns = (
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.hidden for part in parts]),
        torch.cat([part.ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.arange(len(parts)).repeat_interleave(lengths),
        torch.tensor([part.prompt for part in parts]).repeat_interleave(lengths),
    )
    return HeadRows(*(column.to(device) for column in columns))
