"""Which model a set of heads fits, told from the model's directory without loading the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from services.rollout.policy_check import PolicyShape

# The names of LM heads in the model families of `transformers`, then of the input embeddings that stand in for them
# where the two are tied.
_LM_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """hidden, vocab: the LM head's shape. config_sha256: of the settings that fix what the weights compute, layers and
    norms among them. lm_head_sha256: of the LM head rounded to bfloat16, so that a float32 copy of a model is it too.
    """

    hidden: int
    vocab: int
    config_sha256: str
    lm_head_sha256: str

    @staticmethod
    def of(model_dir: Path) -> ModelFingerprint:
        """Reads the configuration and the LM head. Raises ValueError where the directory holds no such model."""
        shape = PolicyShape(model_dir)
        weight = _lm_head(model_dir)
        config = json.dumps(shape.config, sort_keys=True).encode()
        return ModelFingerprint(
            weight.shape[1], weight.shape[0], hashlib.sha256(config).hexdigest(), lm_head_hash(weight)
        )


def lm_head_hash(weight: Tensor) -> str:
    """SHA-256 in hexadecimal of an LM head [V, H], rounded to bfloat16."""
    rounded = weight.detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(rounded.view(torch.int16).numpy().tobytes()).hexdigest()


def output_weights(model_dir: Path) -> tuple[Tensor, Tensor]:
    """LM head and input embedding of a model directory, [V, H] each, in the type they are stored in; one tensor where
    they are tied. Raises ValueError where the directory holds none."""
    lm_head = _lm_head(model_dir)
    files = sorted(model_dir.glob("*.safetensors"))
    for name in _EMBEDDINGS:
        for tensor in _tensors_named(files, name):
            return lm_head, tensor
    return lm_head, lm_head


def _lm_head(model_dir: Path) -> Tensor:
    # An index may leave out a file that lies beside it; the shards that it names are `model*.safetensors` all the same.
    files = sorted(model_dir.glob("*.safetensors"))
    for name in (*_LM_HEADS, *_EMBEDDINGS):
        for tensor in _tensors_named(files, name):
            return tensor
    raise ValueError(f"The model directory {model_dir} holds no LM head under a name that is known.")


def _tensors_named(files: list[Path], ending: str) -> Iterator[Tensor]:
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name == ending or name.endswith(f".{ending}"):
                    yield file.get_tensor(name)
