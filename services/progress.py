"""Progress on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(name: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr; call what it gives with how much is done, and the total where it was not known."""
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=total)

        def step(done: int, whole: int | None = total) -> None:
            progress.update(task, completed=done, total=whole)

        yield step
