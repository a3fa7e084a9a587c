"""Prompts: a data source turned into token ids and reference answers, split into training and held-out prompts.

The same configuration, seed and tokenizer give the same prompts in the same order on every machine: all
randomness comes from `random.Random` seeded with a string, whose sequence Python keeps stable.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.config import DataConfig
from services.learner.sources import DataError, Row, load_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

FINAL_ANSWER_MARK = "####"  # GSM8K ends its worked solutions with "#### 42"


@dataclass(frozen=True, slots=True)
class Prompt:
    """ids: the rendered chat, ready for generation. index: position in its own part, `train` or `holdout`."""

    ids: tuple[int, ...]
    answer: str
    index: int


@dataclass(frozen=True)
class PromptSet:
    """Distinct prompts; no prompt of `holdout` is in `train`.

    duplicates: rows left out because their prompt came before. too_long: rows left out because the prompt
    exceeds `data.max_prompt_tokens`.
    """

    train: tuple[Prompt, ...]
    holdout: tuple[Prompt, ...]
    duplicates: int
    too_long: int
    seed: int

    def order(self, epoch: int) -> list[int]:
        """The positions in `train` in the order of one epoch: a shuffle of its own for each."""
        order = list(range(len(self.train)))
        random.Random(f"{self.seed}/epoch/{epoch}").shuffle(order)  # noqa: S311
        return order


def load_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PromptSet:
    """Reads the source, renders the chats and splits. Raises DataError with one sentence naming the setting."""
    rows = load_rows(config, seed)
    answers = [_answer(row, config) for row in rows]
    rendered = _render(rows, config, tokenizer)

    distinct: dict[tuple[int, ...], str] = {}
    too_long = 0
    for ids, answer in zip(rendered, answers, strict=True):
        if len(ids) > config.max_prompt_tokens:
            too_long += 1
        else:
            distinct.setdefault(ids, answer)
    duplicates = len(rows) - too_long - len(distinct)
    if too_long == len(rows):
        raise DataError(
            f"data.max_prompt_tokens = {config.max_prompt_tokens} is below the length of every prompt of "
            f"{config.source!r}: the shortest has {min(map(len, rendered))} tokens."
        )
    if config.holdout >= len(distinct):
        raise DataError(
            f"data.holdout = {config.holdout} must be smaller than the {len(distinct)} distinct prompts of "
            f"{config.source!r}."
        )
    log.info(
        "%s: %d prompts for training, %d held out; left out %d duplicates and %d longer than %d tokens",
        config.source,
        len(distinct) - config.holdout,
        config.holdout,
        duplicates,
        too_long,
        config.max_prompt_tokens,
    )
    items = list(distinct.items())
    random.Random(f"{seed}/split").shuffle(items)  # noqa: S311
    return PromptSet(
        train=_number(items[config.holdout :]),
        holdout=_number(items[: config.holdout]),
        duplicates=duplicates,
        too_long=too_long,
        seed=seed,
    )


def _number(items: Sequence[tuple[tuple[int, ...], str]]) -> tuple[Prompt, ...]:
    return tuple(Prompt(ids, answer, index) for index, (ids, answer) in enumerate(items))


def _answer(row: Row, config: DataConfig) -> str:
    """The reference answer as text; of a worked solution that marks its final answer, the final answer."""
    value = _column(row, config.answer_column, "data.answer_column")
    if value is None or isinstance(value, list | dict):
        raise DataError(
            f"data.answer_column = {config.answer_column!r} must hold text or numbers, but one row holds {value!r:.60}."
        )
    return str(value).rpartition(FINAL_ANSWER_MARK)[2].strip()


def _messages(row: Row, config: DataConfig) -> list[dict[str, str]]:
    prompt = _column(row, config.prompt_column, "data.prompt_column")
    if isinstance(prompt, list):  # a conversation, used as it is
        messages = list(prompt)
        if not messages or not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
            raise DataError(
                f"data.prompt_column = {config.prompt_column!r} holds a list that is not made of messages with "
                "'role' and 'content'."
            )
    else:
        messages = [{"role": "user", "content": _fill(row, prompt, config)}]
    if config.system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system})
    return messages


def _fill(row: Row, prompt: Any, config: DataConfig) -> str:
    try:
        return config.template.format_map({**row, "prompt": prompt})
    except KeyError as error:
        raise DataError(
            f"data.template uses {{{error.args[0]}}}, but the columns of {config.source!r} are {_list(row)}."
        ) from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DataError(f"data.template = {config.template!r} is not a valid format string: {error}.") from None


def _column(row: Row, name: str, setting: str) -> Any:
    """The value of a column; "a.b" reaches into a column that holds an object."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise DataError(f"{setting} = {name!r} is not a column; the columns are {_list(row)}.")
        value = value[part]
    return value


def _list(row: Row) -> str:
    return ", ".join(sorted(row))


def _render(rows: Sequence[Row], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Token ids of each chat up to where the answer begins. A model without a chat template gets plain text."""
    chats = [_messages(row, config) for row in rows]
    if tokenizer.chat_template is None:
        texts = ["\n\n".join(message["content"] for message in chat) for chat in chats]
        encoded = tokenizer(texts)["input_ids"]
    else:
        encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=False)
    return [tuple(ids) for ids in encoded]
