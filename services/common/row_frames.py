"""Training rows on their way from the verifier to the watcher: one safetensors frame for a run of adjacent positions.

A row is a token with the target's last hidden state *before* it, whose law it was drawn from. The law itself does not
travel: the LM head gives it back, and a row costs two bytes a dimension instead of hundreds more.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

_FORMAT = "1"
_NUMBERS = "numbers"


@dataclass(frozen=True)
class RowFrame:
    """P adjacent positions of one trajectory.

    prompt: names the prompt, so that rows are held out by prompt; 16 hexadecimal digits. policy: version that computed
    the states. temperature, top_p, top_k, min_p: of the law that the tokens were drawn from. tokens: [P] int32;
    hidden: [P, H] bfloat16.
    """

    prompt: str
    policy: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    tokens: Tensor
    hidden: Tensor

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.hidden.ndim != 2 or len(self.tokens) != len(self.hidden):
            raise ValueError(f"rows of tokens {tuple(self.tokens.shape)} and states {tuple(self.hidden.shape)}")
        if len(self.prompt) != 16:
            raise ValueError(f"a prompt's name has 16 digits, not {self.prompt!r}")

    def to_bytes(self) -> bytes:
        prompt = int(self.prompt, 16)
        numbers = torch.tensor(
            [prompt >> 32, prompt & 0xFFFFFFFF, self.policy, self.temperature, self.top_p, self.top_k, self.min_p],
            dtype=torch.float64,
        )
        tensors = {
            "tokens": self.tokens.to(torch.int32).contiguous(),
            "hidden": self.hidden.to(torch.bfloat16).contiguous(),
            _NUMBERS: numbers,
        }
        data: bytes = save(tensors, metadata={"format": _FORMAT})
        return data

    @staticmethod
    def from_bytes(data: bytes) -> RowFrame:
        """Raises ValueError where the bytes are no frame."""
        try:
            tensors = load(data)
            high, low, policy, temperature, top_p, top_k, min_p = tensors[_NUMBERS].tolist()
            tokens, hidden = tensors["tokens"], tensors["hidden"]
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{len(data)} bytes are no frame of rows: {error}") from error
        prompt = f"{(int(high) << 32) + int(low):016x}"
        if tokens.dtype != torch.int32 or hidden.dtype != torch.bfloat16:
            raise ValueError(f"rows of types {tokens.dtype} and {hidden.dtype}")
        return RowFrame(prompt, int(policy), temperature, top_p, int(top_k), min_p, tokens, hidden)


def prompt_name(prompt_ids: Sequence[int]) -> str:
    """16 hexadecimal digits that name a prompt; the same in every process."""
    return hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=8).hexdigest()
