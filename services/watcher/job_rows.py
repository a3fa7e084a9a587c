"""Which rows a training learns from and is judged on, and whether there are enough of them."""

from __future__ import annotations

from services.config import WatcherConfig
from services.watcher.progress import Progress
from services.watcher.row_reader import RowReader
from services.watcher.rows import ChosenRows, RowBuffer

# Training begins only with so many held-out prompts: with fewer the gate could not pass.
_MIN_HELD_OUT_PROMPTS = 6
# Heads for a policy that has moved are judged on held-out rows of the policies that they have learned from, and on
# earlier ones only as far as there are fewer than this, where there are as many.
_LATER_HELD_OUT, _LATER_PROMPTS = 256, 12


class JobRows:
    """needed: rows that the next training takes, where the policy's moving is not its reason."""

    def __init__(self, settings: WatcherConfig, buffer: RowBuffer, reader: RowReader, progress: Progress) -> None:
        self._settings = settings
        self._buffer = buffer
        self._reader = reader
        self._progress = progress
        self.needed = settings.min_rows

    @property
    def seen(self) -> int:
        """Training rows that there are to learn from."""
        return self._buffer.count(held_out=False, since=self._reader.fresh_from)

    def begin_again(self) -> None:
        """The next training begins with as few rows as the first."""
        self.needed = self._settings.min_rows

    def of_later_policies(self) -> int:
        """Training rows of policies that came after the newest one that was learned from."""
        progress = self._progress
        if progress.covered is None:
            progress.covered = self._buffer.first_policy
        if progress.covered is None:
            return 0
        return self._buffer.count(held_out=False, since=self._reader.fresh_from, later_than=progress.covered)

    def missing(self, *, moved: bool) -> str:
        """What there is too little of for training to begin; empty where there is enough. moved: it begins because the
        policy has, and there were enough rows for that."""
        settings, buffer, since = self._settings, self._buffer, self._reader.fresh_from
        needed = 0 if moved else min(self.needed, settings.max_rows)
        held = _LATER_HELD_OUT if moved else settings.min_rows // 4
        held = min(settings.gate_rows // 4, held)
        if self.seen < needed:
            return f"{needed} rows"
        if buffer.count(held_out=True, since=since) < held:
            return f"{held} rows of prompts that are held out"
        if buffer.prompts(held_out=True, since=since) < _MIN_HELD_OUT_PROMPTS:
            share = f"a share of {settings.holdout:g} of all prompts (watcher.holdout)"
            return f"{_MIN_HELD_OUT_PROMPTS} different prompts that are held out, {share}"
        return ""

    def choose(self, *, moved: bool) -> tuple[ChosenRows, ChosenRows]:
        """Rows to learn from, and held-out ones to judge on. Where the policy has moved those to learn from are the
        newest, no more than half of them from before, and those to judge on are of the same policies."""
        settings, buffer, since = self._settings, self._buffer, self._reader.fresh_from
        if not moved:
            return buffer.training(settings.max_rows, since), buffer.held_out(settings.gate_rows, since)
        training = buffer.training(2 * min(self.of_later_policies(), settings.min_rows), since)
        later_than = max(self._progress.covered or 0, training.policies[0] - 1)
        least = min(settings.gate_rows // 4, _LATER_HELD_OUT)
        return training, buffer.held_out_later(
            settings.gate_rows, since, later_than, least=least, prompts=_LATER_PROMPTS
        )
