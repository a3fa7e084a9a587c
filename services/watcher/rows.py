"""Training rows in the watcher's memory: the newest of every policy version, split by prompt once and for all."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.holdout import is_held_out
from services.common.row_frames import RowFrame

# Policy versions after which a row counts half.
_HALF_LIFE = 12.0


@dataclass(frozen=True)
class ChosenRows:
    """P positions, trajectory by trajectory. tokens: [P] int64; hidden: [P, H] bfloat16; sequence, prompt: [P] int64.

    law: (temperature, top_p, top_k, min_p) that they were drawn from; the most frequent one where several were, and
    rows of the others are left out. policies: oldest and newest version.
    """

    tokens: Tensor
    hidden: Tensor
    sequence: Tensor
    prompt: Tensor
    law: tuple[float, float, int, float]
    policies: tuple[int, int]

    def __len__(self) -> int:
        return int(self.tokens.shape[0])


class RowBuffer:
    """Holds the newest frames, `capacity` rows of training prompts and `held_capacity` of held-out ones at most.

    holdout: share of prompts held out. A prompt is held out by its name alone: it stays on its side for ever, for every
    version of the heads and after a restart.
    """

    def __init__(self, capacity: int, held_capacity: int, holdout: float) -> None:
        self._capacity = {False: capacity, True: held_capacity}
        self._holdout = holdout
        # With the number of rows that had been received before.
        self._frames: dict[bool, deque[tuple[int, RowFrame]]] = {False: deque(), True: deque()}
        self._rows: Counter[bool] = Counter()
        self.newest_policy = 0
        self.first_policy: int | None = None  # of the first row that was received
        self.received = 0

    def add(self, frame: RowFrame) -> None:
        held = is_held_out(frame.prompt, self._holdout)
        frames = self._frames[held]
        frames.append((self.received, frame))
        self._rows[held] += len(frame.tokens)
        self.received += len(frame.tokens)
        self.newest_policy = max(self.newest_policy, frame.policy)
        if self.first_policy is None:
            self.first_policy = frame.policy
        while self._rows[held] - len(frames[0][1].tokens) >= self._capacity[held]:
            self._rows[held] -= len(frames.popleft()[1].tokens)

    def count(self, *, held_out: bool, since: int = 0, later_than: int = -1) -> int:
        """Rows held, of those that came when `since` had been received before, of policies after `later_than`."""
        return sum(len(frame.tokens) for frame in self._since(held_out, since) if frame.policy > later_than)

    def prompts(self, *, held_out: bool, since: int = 0) -> int:
        return len({frame.prompt for frame in self._since(held_out, since)})

    def training(self, rows: int, since: int = 0) -> ChosenRows:
        """Up to `rows` rows, newest first, those of older policies with a chance that halves every twelve versions.

        The chance of a frame depends on its content alone: the same buffer gives the same rows. since: rows received
        before are left out, `received` as it was then.
        """
        return _join(_take(self._since(False, since), rows, self.newest_policy))

    def held_out(self, rows: int, since: int = 0) -> ChosenRows:
        """The newest rows of held-out prompts: as near to the current policy as there are enough."""
        return _join(_take(self._since(True, since), rows, None))

    def held_out_later(self, rows: int, since: int, later_than: int, *, least: int, prompts: int) -> ChosenRows:
        """Like `held_out`, only those of policies after `later_than`, and as many earlier ones as are missing to
        `least` rows of `prompts` prompts."""
        frames = self._since(True, since)[::-1]
        chosen = _take([frame for frame in frames if frame.policy > later_than][::-1], rows, None)
        taken, names = sum(len(frame.tokens) for frame in chosen), {frame.prompt for frame in chosen}
        for frame in frames:
            if taken >= rows or (taken >= least and len(names) >= prompts):
                break
            if frame.policy <= later_than:
                chosen.insert(0, frame)
                taken += len(frame.tokens)
                names.add(frame.prompt)
        return _join(chosen)

    def _since(self, held_out: bool, since: int) -> list[RowFrame]:
        return [frame for at, frame in self._frames[held_out] if at >= since]


def _take(frames: Sequence[RowFrame], rows: int, newest: int | None) -> list[RowFrame]:
    chosen: list[RowFrame] = []
    for frame in reversed(frames):
        if rows <= 0:
            break
        if newest is not None:
            luck = (int(frame.prompt[8:], 16) * 31 + frame.policy * 17 + len(frame.tokens)) % 997 / 997
            if luck > 0.5 ** ((newest - frame.policy) / _HALF_LIFE):
                continue
        chosen.append(frame)
        rows -= len(frame.tokens)
    return chosen[::-1]


def _law(frame: RowFrame) -> tuple[float, float, int, float]:
    return (frame.temperature, frame.top_p, frame.top_k, frame.min_p)


def _join(frames: Iterable[RowFrame]) -> ChosenRows:
    frames = list(frames)
    if not frames:
        raise ValueError("there are no rows yet")
    weight: Counter[tuple[float, float, int, float]] = Counter()
    for frame in frames:
        weight[_law(frame)] += len(frame.tokens)
    law = weight.most_common(1)[0][0]
    frames = [frame for frame in frames if _law(frame) == law]
    lengths = torch.tensor([len(frame.tokens) for frame in frames])
    names = {name: i for i, name in enumerate(sorted({frame.prompt for frame in frames}))}
    return ChosenRows(
        torch.cat([frame.tokens for frame in frames]).to(torch.int64),
        torch.cat([frame.hidden for frame in frames]),
        torch.arange(len(frames)).repeat_interleave(lengths),
        torch.tensor([names[frame.prompt] for frame in frames]).repeat_interleave(lengths),
        law,
        (min(frame.policy for frame in frames), max(frame.policy for frame in frames)),
    )
