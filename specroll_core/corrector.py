"""What moves the heads' states within a trajectory: the interface that all forms of the correction share."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specroll_core.pending import Matured


class Corrector(Protocol):
    """State of a number of slots, each of one trajectory or of one group whose siblings share it.

    memo: numbers that it wants back with each matured proposal. wants_candidates: it also wants the tree's tokens.
    """

    memo: int
    wants_candidates: bool

    @property
    def bytes(self) -> int:
        """Of all slots' state."""
        ...

    def reset(self, slot: int) -> None:
        """A new trajectory or group, or none, in this slot."""
        ...

    def halve(self) -> None:
        """What was learned about other heads is worth half."""
        ...

    def correct(self, slots: Tensor, z: Tensor, h: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """slots: [B] int64; z: [B, K, H], the heads' states; h, e: [B, H], the state before the pending token and the
        token's embedding. Returns u [B, K, H] in z's type, and the memo [B, memo] float32 of the round."""
        ...

    def learn(self, slots: Tensor, matured: Matured) -> None:
        """slots: [n] int64, of each matured proposal, by token ids; several may be of one slot and head, and then stand
        in the order of their positions."""
        ...
