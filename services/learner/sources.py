"""Rows of a data source: `reasoning-gym:NAME`, a local file, or a data set by name.

Each source gives dictionaries from column to value, at most `data.size` of them, the same on every machine.
"""

from __future__ import annotations

import csv
import difflib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from services.config import DataConfig

GENERATOR_PREFIX = "reasoning-gym:"

Row = dict[str, Any]


class DataError(ValueError):
    """A data source that cannot be used; one sentence that names the setting."""


def load_rows(config: DataConfig, seed: int) -> list[Row]:
    """At most `config.size` rows. seed: for generated sources only. Raises DataError."""
    if config.source.startswith(GENERATOR_PREFIX):
        return _generate(config.source.removeprefix(GENERATOR_PREFIX), config, seed)
    reader = _READERS.get(Path(config.source).suffix.lower())
    if reader is None:
        return _load_named(config)
    path = Path(config.source).expanduser()
    if not path.is_file():
        raise DataError(f"data.source = {config.source!r} is not an existing file.")
    try:
        rows = list(itertools.islice(reader(path), config.size))
    except UnicodeDecodeError as error:
        raise DataError(f"data.source = {config.source!r} is not UTF-8 text.") from error
    if not rows:
        raise DataError(f"data.source = {config.source!r} holds no rows.")
    return rows


def _generate(name: str, config: DataConfig, seed: int) -> list[Row]:
    """Rows of a procedural data set: `question`, `answer`, and its metadata as columns of their own."""
    import reasoning_gym  # imported late: it pulls in a hundred generators
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise DataError(f"data.source = {config.source!r} names no data set of reasoning-gym{hint}")
    try:
        generated = reasoning_gym.create_dataset(name, **{"size": config.size, "seed": seed, **config.options})
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"data.options do not suit {config.source!r}: {str(error).rstrip('.')}.") from error
    return [
        {**_scalars(item["metadata"]), "question": item["question"], "answer": item["answer"]} for item in generated
    ]


def _scalars(metadata: Row) -> Row:
    return {key: value for key, value in metadata.items() if isinstance(value, str | int | float)}


def _load_named(config: DataConfig) -> list[Row]:
    """Rows of a data set that `datasets` knows: a hub name, or a directory in one of its formats."""
    import datasets

    try:
        loaded = datasets.load_dataset(config.source, config.subset, split=config.split)
    except (OSError, ValueError) as error:  # not found, no network, unknown subset or split
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise DataError(f"data.source = {config.source!r} cannot be loaded: {reason}.") from error
    return list(loaded.select(range(min(config.size, len(loaded)))))


def _read_json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _as_row(_parse_json(line, path, number), path)


def _read_json(path: Path) -> Iterator[Row]:
    rows = _parse_json(path.read_text(encoding="utf-8"), path, 1)
    if not isinstance(rows, list):
        raise DataError(f"data.source = {str(path)!r} must hold an array of objects.")
    for row in rows:
        yield _as_row(row, path)


def _parse_json(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(f"data.source = {str(path)!r} is not valid JSON at line {line}: {error.msg}.") from error


def _as_row(value: Any, path: Path) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"data.source = {str(path)!r} must hold objects, not {type(value).__name__} values.")
    return value


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8", newline="") as lines:
        yield from csv.DictReader(lines)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"data.source = {str(path)!r} is not a Parquet file: {error}.") from error


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
