"""Trajectory memory: proposes what followed, earlier on, the tokens that were just emitted *or drafted*.

A match may begin inside the draft, after a head's token. Let `m[j]` be the number of tokens, at most 8, that end at
remembered position j and equal the end of (context + drafted path). Following a drafted token v,

    m_child[j] = min(8, m_parent[j - 1] + 1) where token[j] = v, else 0.

With c_n(v) the number of positions with m >= n whose next token is v, and N_n = sum_v c_n(v), the law of the next token
is interpolated from order 1 to 8:

    P_n(v) = (c_n(v) + 0.7 P_{n-1}(v)) / (N_n + 0.7),    P_0 = 0.

Unrolled, a position with match length m adds `W_m = sum_{n <= m} w_n` to P_8 of its next token, where
`w_n = 1 / (N_n + 0.7) * prod_{k > n} 0.7 / (N_k + 0.7)`: one pass over the matches. Positions with m >= 2 are listed
under their pair of tokens; those with m = 1 enter through the pairs' counts, so nothing scans the whole history.

Plain suffix matching from the root (prompt lookup; DAS, arXiv 2511.13841) is the case `inside_starts=False`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specroll_core.memory_store import TokenStore, match_length

# Longest match that is told apart from shorter ones.
ORDERS = 8
# Weight of the lower orders' law, in occurrences.
BACK_OFF = 0.7

# min(8, m + 1) by m.
_LONGER = (*range(1, ORDERS + 1), ORDERS)

# A token, its probability and the longest match that saw it: the fields of a `PathCandidate`.
Suggestion = tuple[int, float, int]
# Entries at which the context ends, with the length of the match.
Matches = dict[int, int]
# token, matches of two tokens or more in the near and the far store (entry -> length), whether shorter ones count here.
_State = tuple[int, Matches | None, Matches | None, bool]


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """inside_starts: matches may begin inside the draft. max_depth: deepest node that memory proposes. floor: tokens of
    lower probability are not proposed. walk: most recent occurrences of one pair of tokens that are looked at, which
    bounds the time of a step. far_weight: of an occurrence in the far store, where one in the near store counts 1."""

    inside_starts: bool = True
    max_depth: int = 8
    floor: float = 0.02
    walk: int = 32
    far_weight: float = 0.5

    def __post_init__(self) -> None:
        if self.max_depth < 1 or self.walk < 1:
            raise ValueError("max_depth and walk must be at least 1.")
        if not 0 <= self.floor < 1:
            raise ValueError("floor must be at least 0 and below 1.")
        if not 0 < self.far_weight <= 1:
            raise ValueError("far_weight must be above 0 and at most 1.")


class TrajectoryMemory:
    """A `PathProposer` for one request.

    near: what holds the request's own prompt and tokens, perhaps with its siblings'. far: other prompts' rollouts,
    of which matches of one token say nothing and are left out. Whoever owns the stores writes them; `observe` moves the
    context that the next root stands at. States are numbers: a token where nothing longer than it matches, else
    -1 - (its place among the states of this round). They are good until the next call of `root`.
    """

    def __init__(
        self,
        near: TokenStore,
        context: Iterable[int] = (),
        far: TokenStore | None = None,
        options: MemoryOptions | None = None,
    ) -> None:
        self.options = options or MemoryOptions()
        self.max_depth = self.options.max_depth
        self._near = near
        self._far = far
        self._context = list(context)[-ORDERS:]
        self._states: list[_State] = []
        # token -> (occurrences that have a follower, its law of order 1), for this round
        self._singles: dict[int, tuple[int, list[Suggestion]]] = {}

    @property
    def context(self) -> tuple[int, ...]:
        """The last tokens, as many as can match."""
        return tuple(self._context)

    def observe(self, tokens: Sequence[int]) -> None:
        """Moves the context by emitted tokens."""
        self._context = [*self._context, *tokens][-ORDERS:]

    def root(self) -> int:
        self._states.clear()
        self._singles.clear()
        if not self._context:
            return self._add((-1, None, None, True))
        far = None if self._far is None else self._at_root(self._far)
        return self._add((self._context[-1], self._at_root(self._near), far, True))

    def descend(self, state: int, token: int) -> int:
        parent, near, far, inside = (state, None, None, True) if state >= 0 else self._states[-1 - state]
        followers = self._near.pairs.get(parent)
        entries = None if followers is None else followers.get(token)
        near = None if entries is None else self._extend(self._near, entries, near, inside)
        if self._far is not None:
            followers = self._far.pairs.get(parent)
            entries = None if followers is None else followers.get(token)
            far = None if entries is None else self._extend(self._far, entries, far, inside)
        inside = self.options.inside_starts
        return token if inside and near is None and far is None else self._add((token, near, far, inside))

    def children(self, state: int) -> list[Suggestion]:
        if state >= 0:
            return self._single(state)[1]
        token, near, far, inside = self._states[-1 - state]
        if near is None and far is None:
            return self._single(token)[1] if inside else []
        return self._law(token, near, far, inside)

    def _add(self, state: _State) -> int:
        self._states.append(state)
        return -len(self._states)

    def _at_root(self, store: TokenStore) -> Matches | None:
        """All entries at which two tokens or more of the context end."""
        context = self._context
        if len(context) < 2:
            return None
        entries = store.pairs.get(context[-2], {}).get(context[-1])
        if entries is None:
            return None
        return {entry: match_length(store, entry, context, ORDERS) for entry in entries[-self.options.walk :]}

    def _extend(self, store: TokenStore, entries: list[int], parent: Matches | None, inside: bool) -> Matches | None:
        """The matches one token further on. entries: of that token behind the parent's."""
        if len(entries) > self.options.walk:
            entries = entries[-self.options.walk :]
        before = store.before
        if inside:
            if parent is None:
                return dict.fromkeys(entries, 2)
            get = parent.get
            return {entry: _LONGER[get(before[entry], 1)] for entry in entries}
        if parent is None:
            return None
        return {entry: _LONGER[parent[before[entry]]] for entry in entries if before[entry] in parent} or None

    def _single(self, token: int) -> tuple[int, list[Suggestion]]:
        """How often a token has a follower in the near store, and the law of order 1 behind it."""
        known = self._singles.get(token)
        if known is None:
            followers = self._near.pairs.get(token)
            if followers is None:
                known = 0, []
            else:
                total = sum(map(len, followers.values()))
                scale = 1 / (total + BACK_OFF)
                least = self.options.floor * (total + BACK_OFF)
                law = [(v, len(entries) * scale, 1) for v, entries in followers.items() if len(entries) >= least]
                known = total, law
            self._singles[token] = known
        return known

    def _law(self, token: int, near: Matches | None, far: Matches | None, inside: bool) -> list[Suggestion]:
        counts = [0.0] * (ORDERS + 1)  # by match length
        close = self._followed(self._near, near, 1.0, counts)
        distant = [] if self._far is None else self._followed(self._far, far, self.options.far_weight, counts)
        # Every occurrence of the token counts for order 1, and is counted in the pairs, not above.
        singles = self._single(token)[0] if inside else 0
        if not close and not distant:
            return self._single(token)[1] if singles else []
        first = singles + sum(counts) - (len(close) if singles else 0)
        weights = _weights(counts, first)
        probs: dict[int, float] = {}
        orders: dict[int, int] = {}
        for after, length in distant:
            probs[after] = probs.get(after, 0.0) + self.options.far_weight * weights[length]
            if length > orders.get(after, 0):
                orders[after] = length
        lowest = weights[1] if singles else 0.0
        for after, length in close:
            probs[after] = probs.get(after, 0.0) + weights[length] - lowest
            if length > orders.get(after, 0):
                orders[after] = length
        floor = self.options.floor
        if singles:
            followers = self._near.pairs[token]
            for after in probs:
                if after in followers:
                    probs[after] += lowest * len(followers[after])
            if lowest * singles >= floor:
                least = floor / lowest
                for after, entries in followers.items():
                    if len(entries) >= least and after not in probs:
                        probs[after] = lowest * len(entries)
                        orders[after] = 1
        return [(after, p, orders[after]) for after, p in probs.items() if p >= floor]

    @staticmethod
    def _followed(
        store: TokenStore, matches: Matches | None, weight: float, counts: list[float]
    ) -> list[tuple[int, int]]:
        """(next token, match length) of the matches that have a next token; adds their weight to `counts`."""
        if matches is None:
            return []
        following = store.following
        found = []
        for entry, length in matches.items():
            after = following[entry]
            if after >= 0:
                found.append((after, length))
                counts[length] += weight
        return found


def _weights(counts: list[float], first: float) -> list[float]:
    """W_m for m = 0..8 from the number of occurrences by match length; `first` is N_1."""
    out = [0.0] * (ORDERS + 1)
    kept, at_least = 1.0, 0.0
    for n in range(ORDERS, 0, -1):
        at_least = first if n == 1 else at_least + counts[n]
        if at_least:
            out[n] = kept / (at_least + BACK_OFF)
            kept *= BACK_OFF * out[n] / kept
    for n in range(1, ORDERS + 1):
        out[n] += out[n - 1]
    return out
