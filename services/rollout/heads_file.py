"""Future-token heads on disk: one safetensors file, with the shape in its metadata."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specroll_core.heads import FutureTokenHeads, HeadsSpec, check_state

# The file's name inside an artifact's directory.
HEADS_FILE = "heads.safetensors"
_METADATA_KEY = "specroll_heads"
_ARCHITECTURE = HeadsSpec(heads=1, hidden=1, rank=1, vocab=1).architecture


def save_heads(heads: FutureTokenHeads, path: Path) -> None:
    """Writes the float32 masters."""
    state = {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in heads.state_dict().items()}
    save_file(state, path, metadata={_METADATA_KEY: json.dumps(asdict(heads.spec))})


def load_heads(path: Path) -> FutureTokenHeads:
    """What the setting `rollout.engine.speculation.heads` names: a file of heads, or a directory that holds one, which
    `services.heads.artifact` makes. The float32 masters on the CPU. Raises ValueError naming the setting."""
    try:
        return read_heads(_file(path))
    except ValueError as error:
        raise ValueError(f"rollout.engine.speculation.heads = {path} cannot be used: {error}") from error


def read_heads(path: Path) -> FutureTokenHeads:
    """The float32 masters on the CPU. Raises ValueError where the file is absent, damaged or not one of heads."""
    try:
        with safe_open(path, framework="pt") as file:
            described = json.loads((file.metadata() or {})[_METADATA_KEY])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        described["offsets"] = tuple(described["offsets"])
        spec = HeadsSpec(**described)
        if spec.architecture != _ARCHITECTURE:
            raise ValueError(f"its architecture is {spec.architecture!r}, and only {_ARCHITECTURE!r} is known.")
        check_state(spec, state)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of heads: {error}") from error
    heads = FutureTokenHeads(spec)
    heads.load_in_place(state)
    return heads


def _file(path: Path) -> Path:
    for candidate in (path / HEADS_FILE, path / "latest" / HEADS_FILE):
        if candidate.is_file():
            return candidate
    return path
