"""Reads a run's configuration, applies `--set` overrides, and says in full sentences what is wrong with it.

Paths inside a configuration (`run.dir`, `data.source`, `model.source`) are relative to the current directory, as
on the command line, and not to the file that names them: an example can be run from anywhere without writing
into the directory it lies in.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from services.config import Config
from services.machine import computing_dtype

REDACTED = "***"

# What a run's checkpoint and its trained-prompt record were made with. Anything else may change on resume.
FIXED_ON_RESUME = (
    "run.seed",
    "model",
    "data",
    "sampling",
    "reward.verifier",
    "learner.batch_groups",
    "learner.group_size",
)
_URL_PASSWORD = re.compile(r"(://[^/@\s]*?:)[^/@\s]+(?=@)|([?&](?:password|token)=)[^&\s]+")
_TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "string": "a string",
    "bool": "true or false",
    "tuple": "an array",
    "list": "an array",
    "dict": "a table",
    "model": "a table",
    "path": "a path",
    "finite": "a finite number",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


class ConfigError(ValueError):
    """What is wrong with a configuration: one sentence per problem, one problem per line."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file, or the defaults where `path` is None, after the overrides.

    overrides: "section.name=value" each; the value is read as TOML, and as a plain string where it is not TOML.
    Raises ConfigError.
    """
    raw = _read_toml(path) if path is not None else {}
    problems = [problem for text in overrides if (problem := _apply_override(raw, text))]
    if problems:
        raise ConfigError(problems)
    try:
        # By way of JSON, where strict mode still takes arrays for tuples and strings for paths, but neither
        # "8" nor true for a whole number.
        config = Config.model_validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(_sentences(error.errors())) from None
    return _for_this_machine(config)


def dump(config: Config, redacted: bool = True) -> dict[str, Any]:
    """The configuration as a JSON object that `Config.model_validate` takes back.

    redacted: passwords and tokens are replaced, so the result may be logged or written down. Without it the
    result holds the secrets and must go to a private pipe only.
    """
    return {name: _plain(getattr(config, name), redacted) for name in type(config).model_fields}


def digest(config: Config) -> str:
    """SHA-256 (hexadecimal) of what a learner and its workers must agree on: model, sampling law, verifier, seed.

    Of the model's source only the last part counts: a directory may lie elsewhere on another machine.
    """
    shared = {
        "model": PurePath(config.model.source).name,
        "dtype": config.model.dtype,
        "sampling": _plain(config.sampling, redacted=False),
        "verifier": config.reward.verifier,
        "seed": config.run.seed,
    }
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()


def check_resume(old: Mapping[str, Any], new: Config) -> None:
    """Raises ConfigError where `new` cannot continue the run that was made with `old`.

    old: what `dump` gave for the earlier run. Data, model, sampling law, batch shape, verifier and seed are
    fixed, and `learner.steps` may only grow; learning rate, staleness, threads, ports and logging may change.
    """
    before, after = dict(_flatten(old)), dict(_flatten(dump(new)))
    problems = [
        f"{name} = {_show(after.get(name))} must stay {_show(before.get(name))} as in the run being resumed."
        for name in sorted(before.keys() | after.keys())
        if any(name == fixed or name.startswith(f"{fixed}.") for fixed in FIXED_ON_RESUME)
        and before.get(name) != after.get(name)
    ]
    steps_before, steps_after = before.get("learner.steps", 0), after["learner.steps"]
    if steps_after < steps_before:
        problems.append(f"learner.steps = {steps_after} must be at least the {steps_before} of the run being resumed.")
    if problems:
        raise ConfigError(problems)


def _for_this_machine(config: Config) -> Config:
    """With what the machine decides filled in, so that it is written down with the run, and a resumed run keeps it."""
    if config.model.dtype != "auto":
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": computing_dtype()})})


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"The configuration file {path} does not exist."]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"The configuration file {path} is not UTF-8 text."]) from None
    except OSError as error:
        raise ConfigError([f"The configuration file {path} cannot be read: {error.strerror}."]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"The configuration file {path} is not valid TOML: {error}."]) from None


def _apply_override(raw: dict[str, Any], text: str) -> str | None:
    """Sets one value in `raw`; the sentence that says why it cannot, or None."""
    name, equals, value = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        return f"--set {text} must have the form section.name=value."
    table: Any = raw
    for depth, part in enumerate(parts[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return f"--set {text} cannot be applied because {'.'.join(parts[:depth])} is not a section."
    table[parts[-1]] = _parse_value(value.strip())
    return None


def _parse_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text  # a line break in the text would begin another key


def _sentences(errors: Sequence[ErrorDetails]) -> list[str]:
    """One sentence per setting. A union reports every branch that failed: their types go into one sentence."""
    by_name: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        name = _setting(error["loc"]) or error["msg"]
        by_name.setdefault(name, []).append(error)
    return [_sentence(_setting(same[0]["loc"]), same) for same in by_name.values()]


def _setting(location: Sequence[int | str]) -> str:
    """The setting's name as a user writes it: `learner.steps`, `sampling.stop[0]`, `data.options.size`."""
    name, table = "", False
    section: type[BaseModel] | None = Config
    for item in location:
        if isinstance(item, int):
            name += f"[{item}]"
        elif section is not None or table:
            name += f".{item}" if name else item
            info = section.model_fields.get(item) if section is not None else None
            table = info is not None and get_origin(info.annotation) is dict
            section = _section(section, item) if section is not None else None
        # anything further is the name of a union's branch
    return name


def _sentence(name: str, errors: Sequence[ErrorDetails]) -> str:
    error = errors[0]
    kind, value = error["type"], _show(error["input"])
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(name)
    if kind == "value_error":
        message = str(context["error"]).rstrip(".")
        return f"{name}.{message}." if name else f"{message}."
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"{name} = {value} must be {words} {context[key]}."
    if kind == "literal_error":
        return f"{name} = {value} must be one of {context['expected']}."
    if kind in ("too_long", "missing"):  # an array of fixed length
        return f"{name} does not have the right number of elements."
    types = dict.fromkeys(_TYPE_NAMES.get(e["type"].partition("_")[0], e["msg"]) for e in errors)
    return f"{name} = {value} must be {' or '.join(types)}."


def _unknown(name: str) -> str:
    section, _, last_part = name.rpartition(".")
    every = list(_names(Config))
    siblings = [n for n in every if n.rpartition(".")[0] == section]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.75)
    if not close:  # the right name in another section, else a slip in it
        close = [n for n in every if n.rpartition(".")[2] == last_part][:1]
        close = close or difflib.get_close_matches(name, every, n=1, cutoff=0.75)
    return f"{name} is not a setting; did you mean {close[0]}?" if close else f"{name} is not a setting."


def _names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for field in model.model_fields:
        yield prefix + field
        section = _section(model, field)
        if section is not None:
            yield from _names(section, f"{prefix}{field}.")


def _section(model: type[BaseModel], field: str) -> type[BaseModel] | None:
    info = model.model_fields.get(field)
    kind = info.annotation if info is not None else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _show(value: Any) -> str:
    text = "unset" if value is None else _URL_PASSWORD.sub(_hide, json.dumps(value, default=str))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain(value: Any, redacted: bool) -> Any:
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name), redacted) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {key: _plain(item, redacted) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, redacted) for item in value]
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, str) and redacted:
        return _URL_PASSWORD.sub(_hide, value)
    return str(value) if isinstance(value, PurePath) else value


def _hide(match: re.Match[str]) -> str:
    return f"{match[1] or match[2]}{REDACTED}"


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
