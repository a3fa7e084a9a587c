"""Requests with the same prompt compute it once.

SGLang shares what lies in its prefix cache. Requests that come at the same time, as the samples of a group do, or that
are put back at the same time, as all are when the policy changes, find nothing there: each computes the prompt itself.
Here one of them goes first, and the others wait until its prompt lies in the cache, which takes a step.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

# Tokens that would be computed again: below, a step of waiting costs more.
_WORTH_WAITING = 64
_PROMPT = "specroll_prompt"


class SharedPrompts:
    """The hook around `Scheduler.get_new_batch_prefill`.

    Nothing waits for longer than a request with the same prompt is being computed, and one step.
    """

    def __init__(self) -> None:
        # Of requests that went first in the call before: their results may not have been taken in yet.
        self._leading: set[Hashable] = set()

    def prefill(self, original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
        queue = scheduler.waiting_queue
        full = running_batch.batch_is_full and not running_batch.is_empty()
        if (len(queue) < 2 and not self._leading) or full or scheduler.disable_radix_cache:
            return original(scheduler, running_batch)
        chunked = scheduler.chunked_req
        held = self._held(queue, None if chunked is None else _key(chunked), scheduler.tree_cache)
        if len(held) == len(queue) and chunked is None and running_batch.is_empty():
            held = {}  # nobody is ahead of them any more
        place = {id(request): at for at, request in enumerate(queue)}
        scheduler.waiting_queue = [request for request in queue if id(request) not in held]
        try:
            return original(scheduler, running_batch)
        finally:
            waiting = {id(request) for request in scheduler.waiting_queue}
            self._leading = {_key(held_one) for held_one in held.values()} & {
                _key(request) for request in queue if id(request) not in waiting and id(request) not in held
            }
            everyone = [*scheduler.waiting_queue, *held.values()]
            scheduler.waiting_queue = sorted(everyone, key=lambda request: place.get(id(request), len(place)))

    def _held(self, queue: Sequence[Any], computing: Hashable | None, cache: Any) -> dict[int, Any]:
        """The requests that wait, by `id`. computing: the prompt of a request whose chunks are being computed."""
        by_prompt: defaultdict[Hashable, list[Any]] = defaultdict(list)
        for request in queue:
            by_prompt[_key(request)].append(request)
        held: dict[int, Any] = {}
        for prompt, same in by_prompt.items():
            ahead = prompt == computing or prompt in self._leading
            followers = same if ahead else same[1:]
            if followers and _missing(same[0], cache) * len(followers) >= _WORTH_WAITING:
                held |= {id(request): request for request in followers}
        return held


def _key(request: Any) -> Hashable:
    """What requests that can share their prompt have in common. SGLang's extra key holds the policy's version."""
    ids = getattr(request, _PROMPT, None)
    if ids is None:
        # Kept with the request: a queue is looked at in every step, and prompts may be long. Embeddings that were given
        # in place of tokens are nobody else's.
        own = getattr(request, "input_embeds", None) is not None
        ids = id(request) if own else array("q", request.origin_input_ids).tobytes()
        setattr(request, _PROMPT, ids)
    return request.extra_key, request.cache_salt, ids


def _missing(request: Any, cache: Any) -> int:
    """Tokens of the request's prompt that are not in the cache, the last one apart, which is always computed."""
    from sglang.srt.mem_cache.common import match_kv_cache

    match_kv_cache(request, cache, request.origin_input_ids)
    return len(request.origin_input_ids) - 1 - int(request.prefix_len)
