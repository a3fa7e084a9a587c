"""The command line from the outside."""

from __future__ import annotations

import typer

from services.cli import app
from tests.e2e.cluster import specroll


def commands(command, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of a command and of all below it, which only a group has."""
    below = getattr(command, "commands", {})
    return [words, *(found for name, one in below.items() for found in commands(one, (*words, name)))]


def test_help_answers_for_every_command() -> None:
    """What makes a command slow to answer is an import; time itself is measured in bench/."""
    every = commands(typer.main.get_command(app))
    assert {(), ("train",), ("bench",), ("lossless",), ("watcher",), ("heads", "show"), ("queue", "dead")} <= set(every)
    for words in every:
        process = specroll(*words, "--help", env={"PYTHONPROFILEIMPORTTIME": "1"})
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, f"{words}: {err[-500:]}"
        assert " ".join(("services.cli", *words, "")) in " ".join(out.partition("Usage:")[2].split())
        for module in ("torch", "sglang", "transformers", "grpc", "redis"):
            assert f" {module}\n" not in err, f"`{' '.join(words)} --help` imports {module}"
