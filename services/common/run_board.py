"""What the services of a run tell each other through Redis: who serves where, and which heads are current."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import redis

from services.common.keys import RunKeys
from services.common.lifecycle import Deadline
from services.common.stream_base import retrying

# A worker that has not renewed its line for so long is gone.
LINE_SECONDS = 20.0
_DEADLINE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CurrentHeads:
    """The version that every worker should serve. path: on the watcher's file system; watcher: host:port that has the
    files where the path cannot be read."""

    version: int
    digest: str
    path: str
    watcher: str


class RunBoard:
    """Lines of a run in Redis. Every method raises StreamUnavailable where Redis does not answer."""

    def __init__(self, client: redis.Redis, keys: RunKeys) -> None:
        self._client = client
        self._keys = keys

    def announce(self, worker_id: str, address: str) -> None:
        """Says that a worker serves at host:port; to be said again within `LINE_SECONDS`."""

        def send() -> Any:
            pipe = self._client.pipeline(transaction=True)
            pipe.hset(
                self._keys.workers, worker_id, json.dumps({"address": address, "until": time.time() + LINE_SECONDS})
            )
            pipe.expire(self._keys.workers, 24 * 3600)
            return pipe.execute()

        self._retrying(send, "announce a worker")

    def withdraw(self, worker_id: str) -> None:
        self._retrying(lambda: self._client.hdel(self._keys.workers, worker_id), "withdraw a worker")

    def workers(self) -> dict[str, str]:
        """worker id -> host:port of those that live; lines of the others are removed."""
        lines: dict[bytes, bytes] = self._retrying(lambda: self._client.hgetall(self._keys.workers), "list the workers")
        now, found, gone = time.time(), {}, []
        for name, raw in lines.items():
            line = json.loads(raw)
            if line["until"] >= now:
                found[name.decode()] = str(line["address"])
            else:
                gone.append(name)
        if gone:
            self._retrying(lambda: self._client.hdel(self._keys.workers, *gone), "remove lines of workers")
        return found

    def set_heads(self, heads: CurrentHeads) -> None:
        text = json.dumps(asdict(heads))
        self._retrying(lambda: self._client.set(self._keys.heads, text), "name the current heads")

    def heads(self) -> CurrentHeads | None:
        """None where no watcher has named any."""
        raw = self._retrying(lambda: self._client.get(self._keys.heads), "ask for the current heads")
        return None if raw is None else CurrentHeads(**json.loads(raw))

    @staticmethod
    def _retrying(send: Any, what: str) -> Any:
        return retrying(send, Deadline(_DEADLINE_SECONDS), what)
