"""Tokens of one or several streams, indexed so that continuations of any recent context are found without a scan.

A *stream* is a run of adjacent tokens: a prompt with its completion, or one of several completions of a prompt. Entries
of all streams share one ring; what is oldest is forgotten first. `pairs[a][b]` lists the entries of b that follow an a:
a continuation of order n is looked for among those of order 2 only, which are few.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

# Most that an entry costs, all indices together: four ring columns (16), and where its token and the one before were
# never seen so far a list (88), a number (32), and their share of two dictionaries (up to 350).
BYTES_PER_ENTRY = 512

_NONE = -1


class Store(Protocol):
    """What streams are written into. written: tokens so far, forgotten ones included."""

    capacity: int
    written: int

    def extend(self, tokens: Sequence[int], after: int) -> int:
        """Adds a run of tokens behind entry `after` (-1: a stream begins) and returns the last one's entry."""
        ...

    def run(self, entry: int, count: int) -> list[int]:
        """The last `count` tokens of a stream up to `entry`, or as many as are remembered; none for entry -1."""
        ...


class TokenStore:
    """A ring of at most `capacity` tokens. Entries are numbered by their place in it.

    following: the token after an entry in its stream; before: the entry that it follows; both -1 where there is none.
    pairs: token -> next token -> entries of the latter, oldest first.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 2:
            raise ValueError("capacity must be at least 2 tokens.")
        self.capacity = capacity
        self.written = 0
        self.token = array("i")
        self.following = array("i")
        self.before = array("i")
        self.pairs: dict[int, dict[int, list[int]]] = {}
        self._after = array("i")

    def __len__(self) -> int:
        return len(self.token)

    @property
    def bytes_bound(self) -> int:
        """What the store can never exceed, in bytes."""
        return self.capacity * BYTES_PER_ENTRY

    def append(self, token: int, after: int) -> int:
        """Adds a token behind entry `after` (-1: a stream begins) and returns its entry."""
        entry = self.written % self.capacity
        assert after != entry, "what a token follows must still be there"
        self.written += 1
        if len(self.token) < self.capacity:
            self.token.append(token)
            self.following.append(_NONE)
            self.before.append(after)
            self._after.append(_NONE)
        else:
            self._forget(entry)
            self.token[entry], self.before[entry] = token, after
            self.following[entry] = self._after[entry] = _NONE
        if after >= 0:
            self.following[after] = token
            self._after[after] = entry
            self.pairs.setdefault(self.token[after], {}).setdefault(token, []).append(entry)
        return entry

    def extend(self, tokens: Sequence[int], after: int) -> int:
        for token in tokens:
            after = self.append(token, after)
        return after

    def run(self, entry: int, count: int) -> list[int]:
        found: list[int] = []
        while entry >= 0 and len(found) < count:
            found.append(self.token[entry])
            entry = self.before[entry]
        return found[::-1]

    def _forget(self, entry: int) -> None:
        """Takes the oldest entry out of the index: the pair that it begins. The pair that it ends went before it."""
        successor = self._after[entry]
        if successor < 0:
            return
        first, second = self.token[entry], self.token[successor]
        self.before[successor] = _NONE
        followers = self.pairs[first]
        entries = followers[second]
        entries.remove(successor)
        if not entries:
            del followers[second]
            if not followers:
                del self.pairs[first]


class Stream:
    """One run of tokens that is being written into a store.

    fingerprint: a running hash of the tokens written so far, equal for equal runs.
    """

    __slots__ = ("_last", "_number", "fingerprint", "store")

    def __init__(self, store: Store, tokens: Iterable[int] = ()) -> None:
        self.store = store
        self.fingerprint = 0
        self._last = _NONE
        self._number = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        run = tokens if isinstance(tokens, list | tuple) else list(tokens)
        self._last = self._end()
        if run:
            self._last = self.store.extend(run, self._last)
            self._number = self.store.written
            self.fingerprint = fingerprint(run, self.fingerprint)

    def last(self, count: int) -> list[int]:
        """The last `count` tokens, or as many as are remembered."""
        return self.store.run(self._end(), count)

    def _end(self) -> int:
        """The entry of the last token; -1 where others have filled the ring since, so that it is forgotten, or about
        to be."""
        forgotten = self.store.written - self._number >= self.store.capacity - 1
        return _NONE if forgotten else self._last


def fingerprint(tokens: Iterable[int], mark: int = 0) -> int:
    """The running hash of a stream that holds these tokens; mark: of what it held before them."""
    for token in tokens:
        mark = hash((mark, token))
    return mark


def match_length(store: TokenStore, entry: int, context: Sequence[int], longest: int) -> int:
    """How many tokens that end with `entry` equal the end of `context`, at most `longest`; the last one must."""
    token, before = store.token, store.before
    length = 1
    for i in range(len(context) - 2, max(-1, len(context) - 1 - longest), -1):
        entry = before[entry]
        if entry < 0 or token[entry] != context[i]:
            break
        length += 1
    return length
