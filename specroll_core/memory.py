"""Trajectory memory: proposes what followed, earlier on, the tokens that were just emitted *or drafted*.

A match may begin inside the draft, after a head's token. Let `m[j]` be the number of tokens, at most 8, that end at
remembered position j and equal the end of (context + drafted path). Following a drafted token v,

    m_child[j] = min(8, m_parent[j - 1] + 1) where token[j] = v, else 0.

With c_n(v) the number of positions with m >= n whose next token is v, and N_n = sum_v c_n(v), the law of the next token
is interpolated from order 1 to 8:

    P_n(v) = (c_n(v) + 0.7 P_{n-1}(v)) / (N_n + 0.7),    P_0 = 0.

What others have generated, siblings or other prompts' rollouts, enters one rung lower: P_{n-1} is first replaced by
`(f_n(v) + 0.7 P_{n-1}(v)) / (F_n + 0.7)`, for n >= 2, where f_n counts their positions by a small weight each. Of
matches of one length, the trajectory's own says most about what comes next; a longer one of others says more than a
short one.

Unrolled, a position with match length m adds `W_m = sum_{n <= m} w_n` to P_8 of its next token, where w_n is
`1 / (N_n + 0.7)` times what the rungs above have left: one pass over the matches. Positions with m >= 2 are listed
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

# What a single match of each length leaves of the law of order 1.
REST = tuple((BACK_OFF / (1 + BACK_OFF)) ** max(0, n - 1) for n in range(ORDERS + 1))

# A token, its probability and the longest match that saw it: the fields of a `PathCandidate`.
Suggestion = tuple[int, float, int]
# Entries at which the context ends, with the length of the match.
Matches = dict[int, int]
# token, matches of two tokens or more among its own and in each far store, whether shorter ones count here.
_State = tuple[int, Matches | None, Sequence[Matches | None], bool]


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """inside_starts: matches may begin inside the draft. max_depth: deepest node that memory proposes. floor: tokens of
    lower probability are not proposed. walk: most recent occurrences of one pair of tokens that are looked at, which
    bounds the time of a step."""

    inside_starts: bool = True
    max_depth: int = 8
    floor: float = 0.02
    walk: int = 32

    def __post_init__(self) -> None:
        if self.max_depth < 1 or self.walk < 1:
            raise ValueError("max_depth and walk must be at least 1.")
        if not 0 <= self.floor < 1:
            raise ValueError("floor must be at least 0 and below 1.")


class TrajectoryMemory:
    """A `PathProposer` for one request.

    own: the store of the request's prompt and tokens. far: what others have generated, each store with the weight of
    one of its positions, where an own one counts 1. Whoever owns the stores writes them; `observe` moves the context
    that the next root stands at. States are numbers: a token where nothing longer than it matches, else -1 - (its place
    among the states of this round). They are good until the next call of `root`.
    """

    def __init__(
        self,
        own: TokenStore,
        context: Iterable[int] = (),
        far: Sequence[tuple[TokenStore, float]] = (),
        options: MemoryOptions | None = None,
    ) -> None:
        self.options = options or MemoryOptions()
        self.max_depth = self.options.max_depth
        self._own = own
        self._far = tuple(far)
        self._context = list(context)[-ORDERS:]
        self._states: list[_State] = []
        # token -> (own occurrences that have a follower, its law of order 1), for this round
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
            return self._add((-1, None, (), True))
        far = [self._at_root(store) for store, _ in self._far]
        return self._add((self._context[-1], self._at_root(self._own), far, True))

    def descend(self, state: int, token: int) -> int:
        parent, own, far, inside = (state, None, (), True) if state >= 0 else self._states[-1 - state]
        found = self._extend(self._own, parent, token, own, inside)
        distant: Sequence[Matches | None] = ()
        if self._far:
            distant = [
                self._extend(store, parent, token, far[i] if far else None, inside)
                for i, (store, _) in enumerate(self._far)
            ]
            if not any(distant):
                distant = ()
        inside = self.options.inside_starts
        return token if inside and not found and not distant else self._add((token, found, distant, inside))

    def children(self, state: int) -> list[Suggestion]:
        if state >= 0:
            return self._single(state)[1]
        token, own, far, inside = self._states[-1 - state]
        close = _followed(self._own, own)
        singles, law = self._single(token) if inside else (0, [])
        if far:
            distant = [
                (after, length, weight)
                for (store, weight), matches in zip(self._far, far, strict=True)
                for after, length in _followed(store, matches)
            ]
            if distant:
                return self._law(token, singles, close, distant)
        if not close:
            return law
        if singles and len(close) == 1:
            return self._law_of_one(token, *close[0])
        return self._law(token, singles, close, [])

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

    def _extend(self, store: TokenStore, last: int, token: int, parent: Matches | None, inside: bool) -> Matches | None:
        """The matches one token further on. last: the parent's token."""
        followers = store.pairs.get(last)
        if followers is None:
            return None
        entries = followers.get(token)
        if entries is None:
            return None
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
        """How often a token has a follower in its own store, and the law of order 1 behind it."""
        known = self._singles.get(token)
        if known is None:
            followers = self._own.pairs.get(token)
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

    def _law(
        self, token: int, singles: int, close: list[tuple[int, int]], distant: list[tuple[int, int, float]]
    ) -> list[Suggestion]:
        """The law in general. singles: own occurrences of the token, which all count for order 1 and are in the
        pairs' counts; 0 where that order does not count. close: (next token, match length) of own matches; distant: of
        others' matches, with their weight."""
        own_counts, far_counts = [0.0] * (ORDERS + 1), [0.0] * (ORDERS + 1)
        for _, length in close:
            own_counts[length] += 1
        for _, length, weight in distant:
            far_counts[length] += weight
        own, far = _weights(own_counts, singles or len(close), far_counts)
        probs: dict[int, float] = {}
        orders: dict[int, int] = {}
        for after, length, weight in distant:
            probs[after] = probs.get(after, 0.0) + weight * far[length]
            if length > orders.get(after, 0):
                orders[after] = length
        lowest = own[1] if singles else 0.0
        for after, length in close:
            probs[after] = probs.get(after, 0.0) + own[length] - lowest
            if length > orders.get(after, 0):
                orders[after] = length
        floor = self.options.floor
        if singles:
            followers = self._own.pairs[token]
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

    def _law_of_one(self, token: int, after: int, length: int) -> list[Suggestion]:
        """The most frequent case in closed form: one match, whose every order above 1 lessens the share of the rest."""
        rest = REST[length]
        total, law = self._single(token)
        least = self.options.floor / rest
        found = [(v, p * rest, 1) for v, p, _ in law if p >= least and v != after]
        found.append((after, 1 - rest + rest * len(self._own.pairs[token][after]) / (total + BACK_OFF), length))
        return found


def _followed(store: TokenStore, matches: Matches | None) -> list[tuple[int, int]]:
    """(next token, match length) of the matches that have a next token."""
    if not matches:
        return []
    following = store.following
    return [(following[entry], length) for entry, length in matches.items() if following[entry] >= 0]


def _weights(own_counts: list[float], first: float, far_counts: list[float]) -> tuple[list[float], list[float]]:
    """W_m for m = 0..8 of own positions and of others', from their numbers by match length; `first` is N_1."""
    own, far = [0.0] * (ORDERS + 1), [0.0] * (ORDERS + 1)
    left, own_sum, far_sum = 1.0, 0.0, 0.0
    for n in range(ORDERS, 0, -1):
        own_sum = first if n == 1 else own_sum + own_counts[n]
        if own_sum:
            own[n] = left / (own_sum + BACK_OFF)
            left = BACK_OFF * own[n]
        if n > 1:
            far_sum += far_counts[n]
            if far_sum:
                far[n] = left / (far_sum + BACK_OFF)
                left = BACK_OFF * far[n]
    for n in range(1, ORDERS + 1):
        own[n] += own[n - 1]
        far[n] += far[n - 1]
    return own, far
