"""Rows to train heads on: positions of the model's own rollouts, or of given texts.

A row is a token with the hidden state that it was drawn from and the most likely tokens of that law. Rollouts give
both while they are sampled: what the LM head read and answered at each step is kept, so that the model is not run a
second time. Given texts are read by one forward pass.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from services.config import DataConfig
from services.heads.sampling import TOP, Completion, complete
from services.heads.target import TargetModel
from services.learner.sources import DataError, load_rows
from specroll_core.contracts import SamplingParams
from specroll_core.head_training import HeadRows

# Completions that are sampled together. Up to here each one more makes a token cheaper on a CPU; keys and values of so
# many take a gigabyte for SmolLM2-135M.
BATCH = 128
# Positions whose logits exist at one time: 200 MB in float32 for a vocabulary of 200,000.
_LOGIT_ROWS = 256
# Tokens of one forward pass over texts.
_FORWARD_TOKENS = 8192

Progress = Callable[[int], None]


def sample_rows(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
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
    made = sample_completions(target, prompts, [law], tokens=tokens, seed=seed, batch=batch, progress=progress)
    return join(made, target.device)


def sample_completions(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    laws: Sequence[SamplingParams],
    *,
    tokens: int | None = None,
    seed: int = 0,
    batch: int = BATCH,
    progress: Progress | None = None,
) -> list[Completion]:
    """Like `sample_rows`, with one completion of each prompt that is taken under each law."""
    generator = torch.Generator().manual_seed(seed)
    made: list[Completion] = []
    done, begun, longest = 0, 0, laws[0].max_new_tokens
    while done < tokens if tokens is not None else begun < len(prompts):
        if tokens is None:
            count = len(prompts) - begun
        else:
            # The first batches tell how long completions are; a little more than is missing spares a small last batch.
            mean = done / len(made) if made else longest
            count = math.ceil((1.03 if made else 0.5) * (tokens - done) / mean / len(laws))
        chosen = [(begun + i) % len(prompts) for i in range(count)]
        begun += count
        # Prompts of one length together: no padding is computed on.
        chosen.sort(key=lambda i: len(prompts[i]))
        parts = math.ceil(count * len(laws) / max(batch, len(laws)))
        for part in range(parts):
            some = chosen[count * part // parts : count * (part + 1) // parts]
            report = None if progress is None else lambda n, before=done: progress(before + n)
            for one in complete(target, [prompts[i] for i in some], laws, generator, report):
                made.append(replace(one, prompt=some[one.prompt]))
                done += len(one.tokens)
            if tokens is not None and done >= tokens:
                break
    return made


def text_rows(
    target: TargetModel,
    texts: Sequence[Sequence[int]],
    *,
    progress: Progress | None = None,
) -> HeadRows:
    """Rows of given texts as token ids, each a prompt of its own. Row i is the i + 1st token of a text: the first has
    no law. Texts of one token are left out. progress(done) is called with the rows so far."""
    parts: list[Completion] = []
    for batch in _batches(texts):
        parts += _read(target, batch)
        if progress is not None:
            progress(sum(len(part.tokens) for part in parts))
    if not parts:
        raise ValueError("--texts must hold at least one text of two tokens.")
    return join(parts, target.device)


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


@torch.inference_mode()
def _read(target: TargetModel, batch: Sequence[tuple[int, Sequence[int]]]) -> list[Completion]:
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
        parts.append(Completion(ids[row, 1 : len(text)].clone(), hidden.cpu().clone(), kept, logprobs, name, 0))
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


def join(parts: Sequence[Completion], device: torch.device) -> HeadRows:
    """The rows of completions, each a sequence of its own."""
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


def pack(parts: Sequence[Completion]) -> dict[str, Tensor]:
    """Completions as a few tensors, for a file between processes."""
    return {
        "tokens": torch.cat([part.tokens for part in parts]),
        "hidden": torch.cat([part.hidden for part in parts]),
        "ids": torch.cat([part.ids for part in parts]),
        "logprobs": torch.cat([part.logprobs for part in parts]),
        "shape": torch.tensor([(len(part.tokens), part.prompt, part.law) for part in parts]),
    }


def unpack(packed: Mapping[str, Tensor]) -> list[Completion]:
    """What `pack` was given."""
    lengths, prompts, laws = (column.tolist() for column in packed["shape"].unbind(1))
    columns = [packed[name].split(lengths) for name in ("tokens", "hidden", "ids", "logprobs")]
    return [Completion(*part) for part in zip(*columns, prompts, laws, strict=True)]
