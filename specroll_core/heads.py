"""Future-token heads: small networks that guess the next K tokens from one hidden state.

A round starts from the pending token, already sampled but not yet in the KV cache. Head k = 1..K guesses
the token k places after it, from the hidden state `h` that preceded it and its embedding `e`:

    z_k = h + B_k SiLU(A_k [LN(h); LN(e)] + a_k),    q_k = softmax(W z_k / T)

with the target's own LM head W, frozen and shared. B_k starts at 0, so an untrained head repeats the
target's law one token too early and training moves away from it. Reading `e` follows Hydra and EAGLE
(arXiv 2402.05109, 2401.15077) rather than Medusa (2401.10774), whose heads read h alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class HeadsSpec:
    """The shape of a set of heads and of the model that they fit.

    heads: K. hidden: the target's hidden size H. rank: inner width. vocab: rows of the LM head.
    offsets[k]: how many places after the pending token head k guesses; 1..K.
    """

    heads: int
    hidden: int
    rank: int
    vocab: int
    offsets: tuple[int, ...] = ()
    architecture: str = "low-rank-residual-with-embedding"

    def __post_init__(self) -> None:
        if not 1 <= self.heads <= 8:
            raise ValueError(f"heads = {self.heads} must lie between 1 and 8.")
        if min(self.hidden, self.rank, self.vocab) < 1:
            raise ValueError("hidden, rank and vocab must be positive.")
        if not self.offsets:
            object.__setattr__(self, "offsets", tuple(range(1, self.heads + 1)))
        if self.offsets != tuple(range(1, self.heads + 1)):
            raise ValueError(f"offsets = {self.offsets} must be 1 to {self.heads}: one head for each place.")

    def fingerprint(self) -> str:
        """SHA-256 over the fields; equal exactly where weights are interchangeable."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


class FutureTokenHeads(nn.Module):
    """K heads with stacked weights, so that one batched product serves all of them.

    down: [K, R, 2H]; bias: [K, R]; up: [K, H, R]. A layer norm's own scale and shift would be absorbed by
    `down` and `bias`, so the norms have none. Masters are float32; a serving copy may be bfloat16.
    vocabulary: [M] int64, the tokens of the model's rollouts by falling frequency, over which proposals may be ranked;
    None where it is not known. It is no weight: `state_dict` leaves it out.
    """

    vocabulary: Tensor | None

    def __init__(self, spec: HeadsSpec, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.spec = spec
        K, R, H = spec.heads, spec.rank, spec.hidden
        self.down = nn.Parameter(torch.empty(K, R, 2 * H, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(K, R, dtype=dtype, device=device))
        self.up = nn.Parameter(torch.zeros(K, H, R, dtype=dtype, device=device))
        self.register_buffer("vocabulary", None, persistent=False)
        nn.init.normal_(self.down, std=1 / math.sqrt(2 * H))

    def forward(self, h: Tensor, e: Tensor) -> Tensor:
        """h: [B, H], the state before the pending token; e: [B, H], its embedding. Returns z: [B, K, H] in h's type."""
        K, R, H = self.spec.heads, self.spec.rank, self.spec.hidden
        inner = F.silu(F.linear(self._read(h, e), self.down.view(K * R, 2 * H), self.bias.view(-1)))  # [B, K R]
        delta = torch.bmm(inner.view(-1, K, R).transpose(0, 1), self.up.transpose(1, 2))  # [K, B, H]
        return h.unsqueeze(1) + delta.transpose(0, 1).to(h.dtype)

    def inner_of_first(self, h: Tensor, e: Tensor) -> Tensor:
        """[B, R]: the inner layer of the first head, which says what kind of place this is. h, e: as in `forward`."""
        return F.silu(F.linear(self._read(h, e), self.down[0], self.bias[0]))

    def _read(self, h: Tensor, e: Tensor) -> Tensor:
        shape, dtype = (self.spec.hidden,), self.down.dtype
        return torch.cat([F.layer_norm(h.to(dtype), shape), F.layer_norm(e.to(dtype), shape)], dim=-1)

    @torch.no_grad()
    def load_in_place(self, state: Mapping[str, Tensor]) -> None:
        """Copies new weights into the storage that serves, so that captured CUDA graphs see them.

        Raises ValueError, with the serving weights untouched, for other names or shapes or values that
        are not finite.
        """
        check_state(self.spec, state)
        for name, parameter in self.named_parameters():
            parameter.copy_(state[name])


def check_state(spec: HeadsSpec, state: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless `state` holds exactly the weights of `spec`, all finite."""
    K, R, H = spec.heads, spec.rank, spec.hidden
    shapes = {"down": (K, R, 2 * H), "bias": (K, R), "up": (K, H, R)}
    if set(state) != set(shapes):
        raise ValueError(f"The heads' tensors are {sorted(state)}, but {sorted(shapes)} are needed.")
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise ValueError(f"The heads' tensor {name} has shape {tuple(state[name].shape)}, but {shape} is needed.")
        if not state[name].is_floating_point():
            raise ValueError(f"The heads' tensor {name} is {state[name].dtype}, but a floating type is needed.")
        if not bool(torch.isfinite(state[name]).all()):
            raise ValueError(f"The heads' tensor {name} holds values that are not finite.")


def check_vocabulary(spec: HeadsSpec, ids: Tensor) -> None:
    """Raises ValueError unless `ids` is [M] int64 with M of at least 1, unique and inside the vocabulary."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or ids.numel() == 0:
        raise ValueError(f"The heads' vocabulary is {ids.dtype} {list(ids.shape)}, but a row of int64 is needed.")
    ordered = ids.sort().values
    if int(ordered[0]) < 0 or int(ordered[-1]) >= spec.vocab or bool((ordered[1:] == ordered[:-1]).any()):
        raise ValueError(f"The heads' vocabulary must hold distinct token ids below {spec.vocab}.")


class ProposalVocabulary:
    """The LM head's rows that proposals are ranked over: all of them, or a subset.

    A subset (tokens frequent in recent rollouts and the prompt's) makes the product cheaper. It limits what
    can be proposed, never what can be sampled. ids: [M] int64 ascending and unique, or None for all.
    A subset copies its rows: call `refresh` after the LM head has changed.
    """

    def __init__(self, lm_head: Tensor, ids: Tensor | None = None) -> None:
        self.size = lm_head.shape[0]
        self.ids = ids
        self.inverse: Tensor | None = None
        self.weight = lm_head
        if ids is not None:
            if ids.numel() == 0 or bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= self.size:
                raise ValueError("The proposal vocabulary's ids must be ascending, unique and inside the vocabulary.")
            self.inverse = torch.full((self.size,), -1, dtype=torch.int64, device=lm_head.device)
            self.inverse[ids] = torch.arange(ids.numel(), device=lm_head.device)
            self.weight = lm_head[ids]

    def refresh(self, lm_head: Tensor) -> None:
        """Takes the rows of a changed LM head, into the same storage where it is a copy."""
        assert lm_head.shape[0] == self.size
        if self.ids is None:
            self.weight = lm_head
        else:
            torch.index_select(lm_head, 0, self.ids, out=self.weight)

    def logits(self, z: Tensor) -> Tensor:
        """z: [B, K, H]. Returns [B, K, M] in the LM head's type, as one product over all B K states."""
        B, K, H = z.shape
        return self._product(z.reshape(B * K, H).to(self.weight.dtype)).view(B, K, -1)

    def _product(self, states: Tensor) -> Tensor:
        """states: [n, H] in the LM head's type. Returns [n, M]."""
        return F.linear(states, self.weight)

    def to_token(self, index: Tensor) -> Tensor:
        """Token ids of columns."""
        return index if self.ids is None else self.ids[index]

    def to_column(self, token: Tensor) -> Tensor:
        """Columns of token ids; -1 for tokens outside the subset and for negative ids."""
        if self.inverse is None:
            return token
        return torch.where(token >= 0, self.inverse[token.clamp_min(0)], -1)
