"""Files that a command is asked to write at its end: a mistake in their names is told before any work."""

from __future__ import annotations

from pathlib import Path


def check_output(option: str, path: Path | None) -> None:
    """Raises ValueError naming the option where `path` cannot be a new or replaced file; None is no file."""
    if path is not None and not (path.parent.is_dir() and not path.is_dir()):
        raise ValueError(f"{option} {path} must name a file in a directory that exists.")
