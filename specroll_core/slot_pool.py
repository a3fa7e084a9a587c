"""A fixed number of slots for keys that come and go, some of them without saying so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

# Rounds without use after which a slot may be given to another key. What is retracted comes back sooner, most times;
# what was aborted while it waited never says that it has ended.
IDLE_ROUNDS = 256


class SlotPool:
    """Names the slot of a key, for as long as the key is used. Where all slots are in use, new keys get none."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, -1, -1))
        self._kept: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()  # key: (slot, round of its last use)
        self._round = 0

    def __len__(self) -> int:
        return len(self._kept)

    def next_round(self) -> None:
        self._round += 1

    def take(self, key: Hashable) -> tuple[int, bool]:
        """The key's slot, -1 for none, and whether it is new to it: then it holds what another key has left there."""
        kept = self._kept.get(key)
        if kept is not None:
            self._kept[key] = kept[0], self._round
            self._kept.move_to_end(key)
            return kept[0], False
        if not self._free:
            oldest = next(iter(self._kept), None)
            if oldest is None or self._round - self._kept[oldest][1] < IDLE_ROUNDS:
                return -1, False
            self.release(oldest)
        slot = self._free.pop()
        self._kept[key] = slot, self._round
        return slot, True

    def release(self, key: Hashable) -> None:
        """The key has ended; nothing happens where it has no slot."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._free.append(kept[0])
