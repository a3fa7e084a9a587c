"""Checkpoints: everything that the next step depends on, in safetensors and JSON.

    step_000010/
      policy/                 a Hugging Face directory, loads with `transformers` as it is
      optimizer.safetensors   float32 master weights, Adam's moments and step counts
      random.safetensors      states of the random number generators
      state.json              the trainer's version and counters, and what the caller adds
      manifest.json           size and SHA-256 of every file; written last

A directory without a manifest is unfinished and is never loaded. It is written under another name and renamed, so a
kill at any moment leaves the previous checkpoints as they were.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.common.artifact_store import sha256_of
from services.common.lifecycle import write_json
from services.learner.trainer import Trainer

_PREFIX = "step_"
_MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    path: Path

    @property
    def step(self) -> int:
        return int(self.path.name.removeprefix(_PREFIX))

    @property
    def policy_dir(self) -> Path:
        return self.path / "policy"


def save(directory: Path, trainer: Trainer, extra: dict[str, Any], *, keep: int = 2) -> Path:
    """Writes the checkpoint of the trainer's version and removes all but the newest `keep`; returns its path.

    extra: JSON values, given back by `load`. Once this returns the checkpoint survives a power cut.
    """
    assert keep >= 1
    final = directory / f"{_PREFIX}{trainer.version:06d}"
    partial = directory / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    trainer.save_policy(partial / "policy")
    save_file(
        {k: t.detach().cpu().contiguous() for k, t in trainer.optimizer.tensors().items()},
        partial / "optimizer.safetensors",
    )
    save_file(_random_states(trainer.device), partial / "random.safetensors")
    write_json(partial / "state.json", {"format": _FORMAT, "trainer": trainer.state(), "extra": extra})
    files = sorted(p for p in partial.rglob("*") if p.is_file())
    manifest = {str(p.relative_to(partial)): {"bytes": p.stat().st_size, "sha256": sha256_of(p)} for p in files}
    for path in (*files, partial / "policy"):
        _fsync(path)
    write_json(partial / _MANIFEST, {"format": _FORMAT, "step": trainer.version, "files": manifest})
    _fsync(partial)
    if final.exists():
        # Only after a run went back to an older checkpoint and came here again.
        shutil.rmtree(final)
    partial.rename(final)
    _fsync(directory)
    for old in _finished(directory)[:-keep]:
        shutil.rmtree(old.path)
    return final


def load(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Restores the trainer, of the same model and configuration, and returns the caller's `extra`.

    Raises ValueError where a file is missing, changed or of another model; the trainer is then unchanged.
    """
    manifest = json.loads((path / _MANIFEST).read_text())
    if manifest["format"] != _FORMAT:
        raise ValueError(f"checkpoint {path} has format {manifest['format']}, this version reads {_FORMAT}")
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != entry["bytes"] or sha256_of(file) != entry["sha256"]:
            raise ValueError(f"checkpoint {path} is damaged: {name} is missing or differs from its manifest")
    state = json.loads((path / "state.json").read_text())
    trainer.optimizer.load_tensors(load_file(path / "optimizer.safetensors"))
    trainer.load_state(state["trainer"])
    _restore_random_states(load_file(path / "random.safetensors"), trainer.device)
    return dict(state["extra"])


def latest(directory: Path) -> SavedCheckpoint | None:
    """The newest finished checkpoint, None where there is none."""
    finished = _finished(directory)
    return finished[-1] if finished else None


def _finished(directory: Path) -> list[SavedCheckpoint]:
    found = [SavedCheckpoint(p.parent) for p in directory.glob(f"{_PREFIX}*/{_MANIFEST}")]
    return sorted(found, key=lambda c: c.step)


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
