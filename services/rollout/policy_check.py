"""Whether a policy directory fits the model that is being served, found out before serving is paused.

SGLang copies tensors into the running model one by one. A directory that turns out wrong halfway would leave
a mixture of two policies behind, so names, shapes and values are checked first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.models import check_model_dir

# What fixes the computation that the served model performs with its weights.
_CONFIG_KEYS = (
    "architectures",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "tie_word_embeddings",
)


class PolicyShape:
    """Names and shapes of a model's tensors, and the configuration that they are used with."""

    def __init__(self, directory: Path) -> None:
        """Reads headers only. Raises ValueError where the directory is not a complete model."""
        check_model_dir(directory)
        config = json.loads((directory / "config.json").read_text())
        self.config: dict[str, Any] = {key: config[key] for key in _CONFIG_KEYS if key in config}
        self.max_positions: int | None = config.get("max_position_embeddings")
        self.vocab_size: int = config["vocab_size"]
        self.shapes = {name: shape for _, name, shape in _tensors(directory)}


def check_policy(directory: Path, serving: PolicyShape) -> None:
    """Raises ValueError with one sentence unless every tensor of `directory` can replace the serving one.

    Reads all the weights: a second or two per gigabyte, so call it in a thread.
    """
    found = PolicyShape(directory)
    for key in sorted(serving.config.keys() | found.config.keys()):
        ours, theirs = serving.config.get(key), found.config.get(key)
        if ours != theirs:
            raise ValueError(f"The policy in {directory} has {key} = {theirs!r} where the served model has {ours!r}.")
    missing = serving.shapes.keys() - found.shapes.keys()
    extra = found.shapes.keys() - serving.shapes.keys()
    if missing or extra:
        kind, name = ("lacks", min(missing)) if missing else ("has an unknown tensor", min(extra))
        raise ValueError(f"The policy in {directory} {kind} {name}.")
    for name, shape in found.shapes.items():
        if shape != serving.shapes[name]:
            raise ValueError(
                f"The policy in {directory} has {name} of shape {shape} where the served model has "
                f"{serving.shapes[name]}."
            )
    _check_finite(directory)


def _check_finite(directory: Path) -> None:
    import torch
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor = file.get_tensor(name)
                if not tensor.is_floating_point() or not tensor.numel():
                    continue
                # Both carry a NaN through, and are found in one pass without a copy.
                low, high = torch.aminmax(tensor)
                if not (torch.isfinite(low) and torch.isfinite(high)):
                    raise ValueError(f"The policy in {directory} holds values of {name} that are not finite.")


def _tensors(directory: Path) -> list[tuple[Path, str, tuple[int, ...]]]:
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found += [(path, name, tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__"]
    return found
