"""Reflex's state, one per request slot of a serving worker: opened with the prompt, fed with what is emitted, closed.

What it holds is a function of the tokens alone, so a request that was interrupted goes on as if it had not been: open
its slot again with the prompt and its own tokens. Opening a slot drops whatever it held before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from specroll_core.memory import ORDERS, MemoryOptions, TrajectoryMemory
from specroll_core.memory_store import BYTES_PER_ENTRY, Store, Stream, TokenStore, fingerprint
from specroll_core.proposal import PathProposer

# What a slot holds beside its store: the last tokens, and the states of one round.
_SLOT_BYTES = 64 << 10
# Completions of one group that were left and may be taken up again.
_MOST_LEFT = 256
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ReflexOptions:
    """memory: `path` matches inside the draft too, `suffix` from the context only, `off` proposes nothing.

    slot_tokens: of one request's prompt and own tokens, the most recent are remembered. siblings: requests opened with
    one group key learn from each other while they are generated, within group_tokens for each group and group_bytes for
    all. table: rollouts that have ended are remembered for all prompts within table_bytes. sibling_weight and
    table_weight: of an occurrence there, where one in the request's own tokens counts 1.
    """

    memory: Literal["path", "suffix", "off"] = "path"
    slot_tokens: int = 8192
    siblings: bool = True
    sibling_weight: float = 0.1
    group_tokens: int = 16384
    group_bytes: int = 64 * _MIB
    table: bool = False
    table_weight: float = 0.03
    table_bytes: int = 16 * _MIB
    matching: MemoryOptions = field(default_factory=MemoryOptions)

    def __post_init__(self) -> None:
        if self.slot_tokens < 64 or self.group_tokens < 64:
            raise ValueError("slot_tokens and group_tokens must be at least 64.")
        if not (0 < self.sibling_weight <= 1 and 0 < self.table_weight <= 1):
            raise ValueError("sibling_weight and table_weight must be above 0 and at most 1.")
        if self.group_bytes < self.group_tokens * BYTES_PER_ENTRY:
            raise ValueError(
                f"group_bytes = {self.group_bytes} must hold at least one group: {BYTES_PER_ENTRY} bytes for each of "
                "group_tokens."
            )
        if self.table_bytes < 64 * BYTES_PER_ENTRY:
            raise ValueError(f"table_bytes must be at least {64 * BYTES_PER_ENTRY}.")

    def bytes_bound(self, slots: int) -> int:
        """What Reflex holds at most with so many slots open, in bytes."""
        per_slot = self.slot_tokens * BYTES_PER_ENTRY + _SLOT_BYTES
        return slots * per_slot + self.siblings * self.group_bytes + self.table * self.table_bytes


class Memory(PathProposer, Protocol):
    """A request's proposer: a `TrajectoryMemory`, or what does the same."""

    @property
    def context(self) -> tuple[int, ...]: ...

    def observe(self, tokens: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class MemoryClasses:
    """What stores and memories are made of. store: makes one of a capacity, at most BYTES_PER_ENTRY for each entry;
    memory: takes the arguments of `TrajectoryMemory`, with such stores."""

    store: Callable[[int], Any] = TokenStore
    memory: Callable[..., Memory] = TrajectoryMemory


class _Group:
    """What the siblings of one group have generated so far, in one store."""

    def __init__(self, prompt: Sequence[int], store: Store) -> None:
        self.store = store
        self.fingerprint = hash(tuple(prompt))
        self.open = 0
        self._left: OrderedDict[int, Stream] = OrderedDict()

    def stream(self, tokens: Sequence[int]) -> Stream:
        """A completion that so far holds `tokens`: one that was left there, or a new one."""
        return self._left.pop(fingerprint(tokens), None) or Stream(self.store, tokens)

    def leave(self, stream: Stream) -> None:
        """Notes where a completion stopped: it may be taken up again."""
        self._left[stream.fingerprint] = stream
        if len(self._left) > _MOST_LEFT:
            self._left.popitem(last=False)


@dataclass(slots=True)
class _Slot:
    memory: Memory
    own: Stream
    group: _Group | None
    shared: Stream | None
    emitted: int


class Reflex:
    """State of all slots of one worker. Not thread-safe: called between the steps of one scheduler."""

    def __init__(self, options: ReflexOptions | None = None, classes: MemoryClasses | None = None) -> None:
        self.options = options or ReflexOptions()
        self._classes = classes or MemoryClasses()
        self._matching = replace(self.options.matching, inside_starts=self.options.memory == "path")
        self._slots: dict[int, _Slot] = {}
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()
        self._most_groups = self.options.group_bytes // (self.options.group_tokens * BYTES_PER_ENTRY)
        self._table: Store | None = None
        if self.options.table:
            self._table = self._classes.store(self.options.table_bytes // BYTES_PER_ENTRY)

    def open(
        self, slot: int, prompt_ids: Sequence[int], group_key: Hashable | None = None, own_ids: Sequence[int] = ()
    ) -> None:
        """Begins a request, or takes up one that was interrupted after it had emitted `own_ids`.

        group_key: equal for requests that share this very prompt and may learn from each other; None for none.
        """
        self._drop(slot)
        if self.options.memory == "off":
            return
        own = Stream(self._classes.store(self.options.slot_tokens), (*prompt_ids, *own_ids))
        group = self._group(group_key, prompt_ids) if self.options.siblings and group_key is not None else None
        far: list[tuple[Store, float]] = []
        shared = None
        if group is not None:
            # The prompt's end stands before each completion, so that first tokens are matched as well.
            shared = group.stream((*prompt_ids[-ORDERS:], *own_ids))
            group.open += 1
            far.append((group.store, self.options.sibling_weight))
        if self._table is not None:
            far.append((self._table, self.options.table_weight))
        context = (*prompt_ids[-ORDERS:], *own_ids[-ORDERS:])
        memory = self._classes.memory(own.store, context, far, self._matching)
        self._slots[slot] = _Slot(memory, own, group, shared, len(own_ids))

    def observe(self, slot: int, tokens: Sequence[int]) -> None:
        """Adds what the slot's request has emitted. Slots that are not open are passed over."""
        state = self._slots.get(slot)
        if state is not None and tokens:
            state.own.extend(tokens)
            if state.shared is not None:
                state.shared.extend(tokens)
            state.memory.observe(tokens)
            state.emitted += len(tokens)

    def proposer(self, slot: int) -> Memory | None:
        """What proposes for the slot's next round; None where it is not open."""
        state = self._slots.get(slot)
        return None if state is None else state.memory

    def close(self, slot: int, ended: bool = True) -> None:
        """Drops a slot's state: its request has finished or was aborted or, with ended=False, is to be taken up again.

        What an ended request has emitted goes into the table of other prompts' rollouts, where there is one.
        """
        state = self._slots.get(slot)
        if state is not None and ended and self._table is not None:
            Stream(self._table, state.own.last(state.emitted + ORDERS))
        self._drop(slot)

    def __len__(self) -> int:
        return len(self._slots)

    def _drop(self, slot: int) -> None:
        state = self._slots.pop(slot, None)
        if state is not None and state.group is not None and state.shared is not None:
            state.group.open -= 1
            state.group.leave(state.shared)

    def _group(self, key: Hashable, prompt: Sequence[int]) -> _Group | None:
        """The group of a key, made where there is room: the one idle for longest gives way, one in use never does."""
        group = self._groups.get(key)
        if group is not None:
            self._groups.move_to_end(key)
            return group if group.fingerprint == hash(tuple(prompt)) else None
        if len(self._groups) >= self._most_groups:
            idle = next((k for k, g in self._groups.items() if g.open == 0), None)
            if idle is None:
                return None
            del self._groups[idle]
        group = self._groups[key] = _Group(prompt, self._classes.store(self.options.group_tokens))
        return group
