"""Requests with the same prompt: who is computed when.

The scheduler and its cache are played by a simulation that admits whatever waits, up to `room` requests a call, and
knows a prompt `delay` calls after it was admitted.
"""

from __future__ import annotations

import itertools
from array import array
from types import SimpleNamespace

import pytest

from services.rollout.sglang_plugin import shared_prompts
from services.rollout.sglang_plugin.shared_prompts import SharedPrompts

LONG, OTHER, SHORT = range(80), range(100, 180), range(10)


class Batch:
    def __init__(self, size=0, full=False):
        self.size, self.batch_is_full = size, full

    def is_empty(self):
        return self.size == 0


def request(prompt, policy="a", salt=None, embeds=None):
    return SimpleNamespace(
        origin_input_ids=array("q", prompt), extra_key=policy, cache_salt=salt, input_embeds=embeds, prefix_len=0
    )


class Scheduler:
    def __init__(self, monkeypatch, queue, delay=1, room=100, disable_radix_cache=False):
        self.waiting_queue, self.tree_cache, self.chunked_req = list(queue), self, None
        self.disable_radix_cache = disable_radix_cache
        self.delay, self.room, self.calls = delay, room, itertools.count()
        self.now, self.known = 0, {}
        monkeypatch.setattr(shared_prompts, "_missing", self.missing)

    def missing(self, one, cache):
        since = self.known.get((one.extra_key, bytes(one.origin_input_ids)))
        return 0 if since is not None and since <= self.now else len(one.origin_input_ids) - 1

    def get_new_batch_prefill(self, running_batch):
        admitted, self.waiting_queue = self.waiting_queue[: self.room], self.waiting_queue[self.room :]
        for one in admitted:
            self.known.setdefault((one.extra_key, bytes(one.origin_input_ids)), self.now + self.delay)
        return admitted

    def step(self, hook, running=1, **batch):
        self.now = next(self.calls)
        return hook.prefill(Scheduler.get_new_batch_prefill, self, Batch(running, **batch))


def test_one_goes_first_and_all_others_follow_in_the_next_step(monkeypatch):
    first, second = [request(LONG) for _ in range(3)], [request(OTHER) for _ in range(2)]
    scheduler, hook = Scheduler(monkeypatch, [*first, *second]), SharedPrompts()
    assert scheduler.step(hook, running=0) == [first[0], second[0]]
    assert scheduler.waiting_queue == [*first[1:], second[1]]  # in their order
    assert scheduler.step(hook) == [*first[1:], second[1]]
    assert scheduler.waiting_queue == []


def test_where_results_come_a_step_late_nothing_is_computed_twice(monkeypatch):
    same = [request(LONG) for _ in range(4)]
    scheduler, hook = Scheduler(monkeypatch, same, delay=2), SharedPrompts()
    assert [scheduler.step(hook) for _ in range(3)] == [[same[0]], [], same[1:]]


def test_a_prompt_that_never_gets_into_the_cache_stops_nobody(monkeypatch):
    same = [request(LONG) for _ in range(3)]
    scheduler, hook = Scheduler(monkeypatch, same, delay=1000), SharedPrompts()
    served = [scheduler.step(hook, running=0) for _ in range(3)]
    assert served == [[same[0]], same[1:], []]  # nothing runs, so that nobody is ahead of those who wait
    scheduler, hook = Scheduler(monkeypatch, same, delay=1000), SharedPrompts()
    served = [one for _ in range(6) for one in scheduler.step(hook, running=1)]
    assert served == same


@pytest.mark.parametrize(
    "others",
    [
        [request(LONG, policy="b")],
        [request(LONG, salt="s")],
        [request([*LONG, 7])],
        [request(LONG, embeds=[[0.0]])],
    ],
    ids=["policy", "salt", "prompt", "embeddings"],
)
def test_requests_that_cannot_share_do_not_wait_for_each_other(monkeypatch, others):
    queue = [request(LONG), *others]
    assert Scheduler(monkeypatch, queue).step(SharedPrompts()) == queue


def test_nothing_waits_for_a_short_prompt_or_without_a_cache_or_in_a_full_batch(monkeypatch):
    queue = [request(SHORT) for _ in range(8)]  # 7 that follow, 9 tokens each
    assert Scheduler(monkeypatch, queue).step(SharedPrompts()) == queue
    queue.append(request(SHORT))
    assert Scheduler(monkeypatch, queue).step(SharedPrompts()) == queue[:1]
    queue = [request(LONG), request(LONG)]
    assert Scheduler(monkeypatch, queue, disable_radix_cache=True).step(SharedPrompts()) == queue
    assert Scheduler(monkeypatch, queue).step(SharedPrompts(), full=True) == queue


def test_nothing_is_admitted_while_its_prompt_is_computed_in_chunks(monkeypatch):
    chunked, other, followers = request(LONG), request(OTHER), [request(LONG) for _ in range(2)]
    scheduler, hook = Scheduler(monkeypatch, [*followers, other]), SharedPrompts()
    scheduler.chunked_req = chunked
    assert scheduler.step(hook, running=0) == [other]
    assert scheduler.step(hook, running=0) == []
    scheduler.known["a", bytes(chunked.origin_input_ids)] = 0
    scheduler.chunked_req = None
    assert scheduler.step(hook) == followers


def test_a_request_that_finds_no_room_keeps_its_place(monkeypatch):
    first, second = [request(LONG) for _ in range(2)], [request(OTHER) for _ in range(2)]
    queue = [first[0], second[0], first[1], second[1]]
    scheduler, hook = Scheduler(monkeypatch, queue, room=1), SharedPrompts()
    served = [one for _ in range(4) for one in scheduler.step(hook)]
    assert served == [first[0], second[0], first[1], second[1]]


def test_requests_that_arrive_during_a_call_are_kept(monkeypatch):
    same, late = [request(LONG) for _ in range(2)], request(OTHER)
    scheduler, hook = Scheduler(monkeypatch, same), SharedPrompts()

    def original(scheduler, running_batch):
        scheduler.waiting_queue.append(late)
        scheduler.waiting_queue = scheduler.waiting_queue[1:]

    hook.prefill(original, scheduler, Batch())
    assert scheduler.waiting_queue == [same[1], late]
