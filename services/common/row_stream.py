"""A stream of training rows in Redis, bounded by bytes: new entries push the oldest out.

Rows are replaceable, so nothing waits for a reader and nothing is acknowledged. What is left in the stream is what a
reader that restarts begins with.
"""

from __future__ import annotations

from typing import Any

import redis

# KEYS: stream, byte count. ARGV: payload, bound in bytes. Returns how many entries were pushed out.
_APPEND = """
redis.call('XADD', KEYS[1], '*', 'p', ARGV[1])
local bytes = #ARGV[1]
if redis.call('XLEN', KEYS[1]) == 1 then
  redis.call('SET', KEYS[2], bytes) -- whatever was counted before is gone
else
  bytes = redis.call('INCRBY', KEYS[2], bytes)
end
local trimmed = 0
while bytes > tonumber(ARGV[2]) do
  local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
  if not first then break end
  redis.call('XDEL', KEYS[1], first[1])
  bytes = redis.call('DECRBY', KEYS[2], #first[2][2])
  trimmed = trimmed + 1
end
return trimmed
"""


class RowStream:
    """Both ends. key: the stream's; max_bytes: of all payloads in it. Methods raise what the client raises."""

    def __init__(self, client: redis.Redis, key: str, max_bytes: int) -> None:
        self._client = client
        self._key = key
        self._max_bytes = max_bytes
        self._append: Any = client.register_script(_APPEND)

    def append(self, payload: bytes) -> int:
        """Returns how many of the oldest entries it pushed out. Raises ValueError for one that can never fit."""
        if len(payload) > self._max_bytes:
            raise ValueError(f"{len(payload)} bytes of rows do not fit into a stream of {self._max_bytes}.")
        return int(self._append(keys=[self._key, f"{self._key}:bytes"], args=[payload, self._max_bytes]))

    def read(self, after: str, count: int) -> list[tuple[str, bytes]]:
        """Up to `count` entries behind the id `after` ("0" for all), oldest first; never waits."""
        answer: Any = self._client.xread({self._key: after}, count=count)
        return [(entry.decode(), fields[b"p"]) for _, entries in answer or () for entry, fields in entries]

    @property
    def bytes(self) -> int:
        raw: Any = self._client.get(f"{self._key}:bytes")
        return int(raw or 0)
