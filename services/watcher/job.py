"""A training job as files: what the watcher asks of its trainer process, and what comes back.

A directory holds `job.json`, `rows.safetensors`, `begin.safetensors` where it goes on from heads that do not serve,
while it runs `position.safetensors`, and at the end `heads.safetensors` and, last, `result.json`. A job without a
result is gone on with after a restart.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.common.lifecycle import write_json
from services.rollout.heads_file import HEADS_FILE
from services.watcher.rows import ChosenRows
from specroll_core.head_training import TrainPosition
from specroll_core.heads import FutureTokenHeads

_JOB, _ROWS, _POSITION, RESULT = "job.json", "rows.safetensors", "position.safetensors", "result.json"


@dataclass(frozen=True, slots=True)
class TrainJob:
    """policy_dir: the current policy, whose LM head gives the rows' laws. heads_dir: the serving heads, "" for none.
    serving: their version. heads, rank: the shape of heads that begin from nothing. seconds: after which training
    stops where it stands. nodes: of the gate's trees, root included; sampled_children: its rule. seen: training rows
    that there were, of which older policies' may have been left out. degraded: since when, where that is the reason.
    later: rows of policies later than were learned from before, where the policy's moving is the reason; else 0."""

    policy_dir: str
    heads_dir: str
    serving: int
    heads: int
    rank: int
    epochs: int
    seconds: float
    nodes: int
    sampled_children: bool
    seed: int
    seen: int = 0
    degraded: float | None = None
    later: int = 0


@dataclass(frozen=True, slots=True)
class JobDirectory:
    path: Path

    def write(self, job: TrainJob, training: ChosenRows, held_out: ChosenRows) -> None:
        """The job description comes last: a directory that has one is complete."""
        self.path.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for side, rows in (("train", training), ("held", held_out)):
            for name in ("tokens", "hidden", "sequence", "prompt"):
                tensors[f"{side}.{name}"] = getattr(rows, name).contiguous()
            tensors[f"{side}.law"] = torch.tensor(rows.law, dtype=torch.float64)
            tensors[f"{side}.policies"] = torch.tensor(rows.policies)
        save_file(tensors, self.path / _ROWS)
        write_json(self.path / _JOB, asdict(job))

    def job(self) -> TrainJob:
        """Raises ValueError where there is none."""
        try:
            return TrainJob(**json.loads((self.path / _JOB).read_text()))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path} holds no job: {error}") from error

    def rows(self) -> tuple[ChosenRows, ChosenRows]:
        """Training and held-out rows."""
        tensors = load_file(self.path / _ROWS)

        def side(name: str) -> ChosenRows:
            temperature, top_p, top_k, min_p = tensors[f"{name}.law"].tolist()
            oldest, newest = tensors[f"{name}.policies"].tolist()
            tokens, hidden, sequence, prompt = (
                tensors[f"{name}.{part}"] for part in ("tokens", "hidden", "sequence", "prompt")
            )
            law = (temperature, top_p, int(top_k), min_p)
            return ChosenRows(tokens, hidden, sequence, prompt, law, (oldest, newest))

        return side("train"), side("held")

    @property
    def heads_file(self) -> Path:
        return self.path / HEADS_FILE

    @property
    def begin_file(self) -> Path:
        """Heads that the training begins with in place of the serving ones, where there is one."""
        return self.path / "begin.safetensors"

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self.path / RESULT, result)
        (self.path / _POSITION).unlink(missing_ok=True)

    def result(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self.path / RESULT).read_text())
        except FileNotFoundError:
            return None
        return found

    def save_position(self, heads: FutureTokenHeads, at: TrainPosition) -> None:
        """In one rename: a kill leaves the position before it."""
        tensors = {f"heads.{name}": value.detach().contiguous() for name, value in heads.state_dict().items()}
        tensors |= {f"start.{i}": value.contiguous() for i, value in enumerate(at.start)}
        for index, values in at.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value.contiguous() for name, value in values.items()}
        tensors["step"] = torch.tensor(at.step)
        temporary = self.path / f".{_POSITION}.tmp"
        save_file(tensors, temporary)
        temporary.replace(self.path / _POSITION)

    def load_position(self, heads: FutureTokenHeads) -> Position | None:
        """Puts the heads where they were and returns the rest; None where nothing is saved that can be read."""
        try:
            tensors = load_file(self.path / _POSITION)
            heads.load_in_place({n.removeprefix("heads."): v for n, v in tensors.items() if n.startswith("heads.")})
        except (OSError, SafetensorError, ValueError):
            return None
        return Position(tensors)


class Position:
    """What `train_heads(resume=...)` takes: fills a position from tensors that were saved."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def __call__(self, at: TrainPosition) -> None:
        at.step = int(self._tensors["step"])
        at.start = [self._tensors[f"start.{i}"] for i in range(len(at.start))]
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in self._tensors.items():
            if name.startswith("optimizer."):
                _, index, field = name.split(".")
                state.setdefault(int(index), {})[field] = value
        whole = at.optimizer.state_dict()
        at.optimizer.load_state_dict({**whole, "state": state})
