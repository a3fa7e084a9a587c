"""Future-token heads on disk: one safetensors file, with the shape in its metadata.

Beside the weights it may hold `vocabulary`, the tokens of the model's rollouts by falling frequency: the shape of the
draft law depends on which tokens are ranked, so they travel with what was trained on them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from specroll_core.heads import FutureTokenHeads, HeadsSpec, check_vocabulary

# The file's name inside an artifact's directory.
HEADS_FILE = "heads.safetensors"
# How a sentence names what a user has set.
HEADS_SETTING = "rollout.engine.speculation.heads ="
_METADATA_KEY = "specroll_heads"
_VOCABULARY = "vocabulary"
_ARCHITECTURE = HeadsSpec(heads=1, hidden=1, rank=1, vocab=1).architecture


def save_heads(heads: FutureTokenHeads, path: Path) -> None:
    """Writes the float32 masters, and the vocabulary where they have one."""
    state = {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in heads.state_dict().items()}
    if heads.vocabulary is not None:
        state[_VOCABULARY] = heads.vocabulary.to("cpu").contiguous()
    save_file(state, path, metadata={_METADATA_KEY: json.dumps(asdict(heads.spec))})


def load_heads(path: Path, setting: str = HEADS_SETTING) -> FutureTokenHeads:
    """What the setting `rollout.engine.speculation.heads` names: a file of heads, or a directory that holds one, which
    `services.heads.artifact` makes. The float32 masters on the CPU. setting: what a user named them with. Raises
    ValueError with it."""
    try:
        return read_heads(_file(path))
    except OSError as error:
        raise ValueError(f"{setting} {path} cannot be used: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{setting} {path} cannot be used: {error}") from error


def read_heads(path: Path) -> FutureTokenHeads:
    """The float32 masters on the CPU, with their vocabulary, None in files without one. Raises ValueError where the
    file is absent, damaged or not one of heads."""
    try:
        return _decode(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of heads: {error}") from error


def read_checked(path: Path, sha256: str) -> FutureTokenHeads:
    """`read_heads` of bytes that were hashed: what was checked is what is used, whatever happens to the file.

    Raises ValueError.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ValueError(f"{path} has SHA-256 {found}, and {sha256} was announced")
    try:
        return _decode(data)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of heads: {error}") from error


def _decode(data: bytes) -> FutureTokenHeads:
    # A safetensors file begins with the length of its header, 8 bytes little-endian; `load` leaves the metadata out.
    state = load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    described = json.loads(header.get("__metadata__", {})[_METADATA_KEY])
    described["offsets"] = tuple(described["offsets"])
    spec = HeadsSpec(**described)
    if spec.architecture != _ARCHITECTURE:
        raise ValueError(f"its architecture is {spec.architecture!r}, and only {_ARCHITECTURE!r} is known.")
    vocabulary = state.pop(_VOCABULARY, None)
    heads = FutureTokenHeads(spec)
    heads.load_in_place(state)
    if vocabulary is not None:
        check_vocabulary(spec, vocabulary)
        heads.vocabulary = vocabulary
    return heads


def weights_checksum(state: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """SHA-256 over tensors in the order of their names, as they are stored in `dtype` (their own where None)."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().to("cpu", dtype or state[name].dtype).contiguous()
        digest.update(name.encode())
        digest.update(value.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def served_version(path: Path | None) -> tuple[int, str]:
    """Version and digest of what an engine starts with: (0, "") for none, (1, "") for a file without a manifest."""
    if path is None:
        return 0, ""
    manifest = _file(path).with_name("manifest.json")
    if not manifest.is_file():
        return 1, ""
    raw = manifest.read_bytes()
    return int(json.loads(raw)["version"]), hashlib.sha256(raw).hexdigest()


def _file(path: Path) -> Path:
    for candidate in (path / HEADS_FILE, path / "latest" / HEADS_FILE):
        if candidate.is_file():
            return candidate
    return path
