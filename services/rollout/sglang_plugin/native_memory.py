"""A `TokenStore` and a `TrajectoryMemory` in C++ (`native/token_store.h`, `native/trajectory_memory.h`).

They offer what their Python counterparts offer and answer the same, to the last bit. Trees are grown from them without
Python in between (`native_growth.py`).
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Iterable, Sequence

from specroll_core.memory import BACK_OFF, ORDERS, REST, MemoryOptions, Suggestion
from specroll_core.memory_store import BYTES_PER_ENTRY
from specroll_core.reflex import MemoryClasses

# A match is packed into 28 bits for its entry and 4 for its length.
_MOST_ENTRIES = 1 << 28
assert ORDERS < 1 << 4

_INTEGER, _REAL, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class _Options(ctypes.Structure):
    _fields_ = (("inside_starts", _INTEGER), ("max_depth", _INTEGER), ("walk", _INTEGER), ("floor", _REAL))


class _Constants(ctypes.Structure):
    _fields_ = (("orders", _INTEGER), ("back_off", _REAL), ("rest", _POINTER))


class _Suggestion(ctypes.Structure):
    _fields_ = (("token", ctypes.c_int32), ("probability", _REAL), ("order", ctypes.c_int32))


_REST = array("d", REST)
_CONSTANTS = _Constants(ORDERS, BACK_OFF, _REST.buffer_info()[0])


class NativeTokenStore:
    """A `TokenStore`. Its index is made into Python's containers when it is asked for: for tests."""

    def __init__(self, code: ctypes.CDLL, capacity: int) -> None:
        if capacity < 2:
            raise ValueError("capacity must be at least 2 tokens.")
        assert capacity < _MOST_ENTRIES
        self.capacity = capacity
        self.written = 0
        self.handle: int = code.specroll_store_new(capacity)
        self._code = code
        weakref.finalize(self, code.specroll_store_free, self.handle)

    def __len__(self) -> int:
        return min(self.written, self.capacity)

    @property
    def bytes_bound(self) -> int:
        """What the store can never exceed, in bytes."""
        return self.capacity * BYTES_PER_ENTRY

    @property
    def bytes_held(self) -> int:
        held: int = self._code.specroll_store_bytes(self.handle)
        return held

    def append(self, token: int, after: int) -> int:
        return self.extend((token,), after)

    def extend(self, tokens: Sequence[int], after: int) -> int:
        assert after != self.written % self.capacity, "what a token follows must still be there"
        self.written += len(tokens)
        run = array("i", tokens)
        last: int = self._code.specroll_store_extend(self.handle, run.buffer_info()[0], len(run), after)
        return last

    def run(self, entry: int, count: int) -> list[int]:
        out = (ctypes.c_int32 * min(count, len(self)))()
        found = self._code.specroll_store_run(self.handle, entry, len(out), out)
        return out[:found][::-1]

    @property
    def token(self) -> array[int]:
        return self._columns()[0]

    @property
    def following(self) -> array[int]:
        return self._columns()[1]

    @property
    def before(self) -> array[int]:
        return self._columns()[2]

    @property
    def pairs(self) -> dict[int, dict[int, list[int]]]:
        """As of a `TokenStore`, but that first tokens come in no order."""
        out = (ctypes.c_int32 * (3 * len(self)))()
        count = self._code.specroll_store_pairs(self.handle, out)
        found: dict[int, dict[int, list[int]]] = {}
        for i in range(0, 3 * count, 3):
            found.setdefault(out[i], {}).setdefault(out[i + 1], []).append(out[i + 2])
        return found

    def _columns(self) -> list[array[int]]:
        columns = [array("i", bytes(4 * len(self))) for _ in range(3)]
        self._code.specroll_store_columns(self.handle, *(x.buffer_info()[0] for x in columns))
        return columns


class NativeMemory:
    """A `TrajectoryMemory` over such stores."""

    def __init__(
        self,
        code: ctypes.CDLL,
        own: NativeTokenStore,
        context: Iterable[int] = (),
        far: Sequence[tuple[NativeTokenStore, float]] = (),
        options: MemoryOptions | None = None,
    ) -> None:
        self.options = options or MemoryOptions()
        self.max_depth = self.options.max_depth
        self._stores = own, tuple(store for store, _ in far)  # the memory reads them: they stay
        self._code = code
        passed = _Options(
            self.options.inside_starts, self.max_depth, min(self.options.walk, _MOST_ENTRIES), self.options.floor
        )
        self.handle: int = code.specroll_memory_new(
            own.handle,
            (_POINTER * len(far))(*(store.handle for store, _ in far)),
            (_REAL * len(far))(*(weight for _, weight in far)),
            len(far),
            ctypes.byref(passed),
            ctypes.byref(_CONSTANTS),
        )
        weakref.finalize(self, code.specroll_memory_free, self.handle)
        self._context: list[int] = []
        self.observe(list(context))

    @property
    def context(self) -> tuple[int, ...]:
        """The last tokens, as many as can match."""
        return tuple(self._context)

    @property
    def bytes_held(self) -> int:
        """Beside its stores."""
        held: int = self._code.specroll_memory_bytes(self.handle)
        return held

    def observe(self, tokens: Sequence[int]) -> None:
        """Moves the context by emitted tokens."""
        self._context = [*self._context, *tokens][-ORDERS:]
        last = array("i", self._context)
        self._code.specroll_memory_stand_at(self.handle, last.buffer_info()[0], len(last))

    def root(self) -> int:
        state: int = self._code.specroll_memory_root(self.handle)
        return state

    def descend(self, state: int, token: int) -> int:
        below: int = self._code.specroll_memory_descend(self.handle, state, token)
        return below

    def children(self, state: int) -> list[Suggestion]:
        found = ctypes.POINTER(_Suggestion)()
        count = self._code.specroll_memory_children(self.handle, state, ctypes.byref(found))
        return [(s.token, s.probability, s.order) for s in found[:count]]


def memory_classes(code: ctypes.CDLL) -> MemoryClasses:
    """code: the library that `declare` has been called with."""
    return MemoryClasses(
        lambda capacity: NativeTokenStore(code, capacity),
        lambda *arguments, **options: NativeMemory(code, *arguments, **options),
    )


def declare(code: ctypes.CDLL) -> None:
    """Types of the functions that are called here."""
    for name, result, arguments in (
        ("store_new", _POINTER, (_INTEGER,)),
        ("store_free", None, (_POINTER,)),
        ("store_extend", _INTEGER, (_POINTER, _POINTER, _INTEGER, _INTEGER)),
        ("store_run", _INTEGER, (_POINTER, _INTEGER, _INTEGER, _POINTER)),
        ("store_columns", None, (_POINTER,) * 4),
        ("store_pairs", _INTEGER, (_POINTER, _POINTER)),
        ("store_bytes", _INTEGER, (_POINTER,)),
        ("memory_new", _POINTER, (_POINTER, _POINTER, _POINTER, _INTEGER, _POINTER, _POINTER)),
        ("memory_free", None, (_POINTER,)),
        ("memory_stand_at", None, (_POINTER, _POINTER, _INTEGER)),
        ("memory_root", _INTEGER, (_POINTER,)),
        ("memory_descend", _INTEGER, (_POINTER, _INTEGER, _INTEGER)),
        ("memory_children", _INTEGER, (_POINTER, _INTEGER, _POINTER)),
        ("memory_bytes", _INTEGER, (_POINTER,)),
    ):
        function = getattr(code, f"specroll_{name}")
        function.restype, function.argtypes = result, arguments
