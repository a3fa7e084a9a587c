"""A role that one process of a run holds at a time, with a fencing token.

The lock is a key that expires unless renewed, so that a killed holder's successor waits for at most its lifetime.
Expiry alone does not protect: a holder may be frozen and wake up after its successor has begun. So every taking of
the role counts up a fencing token, and scripts that change what the role protects compare it inside Redis
(`stream_scripts.ACK`).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from typing import Any

import redis

from services.common.keys import RunKeys
from services.common.lifecycle import Deadline
from services.common.stream_base import StreamError, StreamUnavailable, retrying

logger = logging.getLogger(__name__)

# KEYS: lock, fence. ARGV: owner, lifetime in ms. Returns {1, token}, or {0, token of the holder, ms until it expires}.
# An owner that asks again, its reply lost, gets what it has.
_ACQUIRE = """
local held = redis.call('GET', KEYS[1])
if held then
  if string.sub(held, -#ARGV[1]) == ARGV[1] then return {1, held} end
  return {0, held, redis.call('PTTL', KEYS[1])}
end
local token = redis.call('INCR', KEYS[2]) .. ' ' .. ARGV[1]
redis.call('SET', KEYS[1], token, 'PX', ARGV[2])
return {1, token}
"""

# KEYS: lock, fence. ARGV: token, its number, lifetime in ms. An expired lock is taken again where nobody held the
# role since: an outage of Redis longer than the lifetime then costs nothing.
_RENEW = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
if not held and redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
return 1
"""

# KEYS: lock. ARGV: token.
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class LockHeld(StreamError):
    """Another living process has the role; the message names it."""


class LockLost(StreamError):
    """The role went to another process, or may have: stop working on what it protects."""


class ExclusiveLock:
    """The role `role` of a run. A thread renews it three times per lifetime until `release`.

    lifetime_seconds: after which a killed holder's role is free; a successor waits for that long at most.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, role: str, *, lifetime_seconds: float = 10.0) -> None:
        if lifetime_seconds < 0.1:
            raise ValueError(f"lifetime_seconds must be at least 0.1, not {lifetime_seconds}.")
        self.key, self._fence_key, self._role = keys.lock(role), keys.fence(role), role
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._lifetime = lifetime_seconds
        self._acquire_script: Any = client.register_script(_ACQUIRE)
        self._renew_script: Any = client.register_script(_RENEW)
        self._release_script: Any = client.register_script(_RELEASE)
        self._token: str | None = None
        self._lost = False
        self._valid_until = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def token(self) -> str:
        """What the lock's key holds while this process has the role: fencing number and owner."""
        if self._token is None:
            raise LockLost(f"The role {self._role!r} is not held by this process.")
        return self._token

    @property
    def fence(self) -> int:
        """The fencing number: larger than that of every holder before."""
        return int(self.token.partition(" ")[0])

    def acquire(self, deadline_seconds: float | None = None) -> None:
        """Takes the role, waiting for a dead holder's lock to expire.

        deadline_seconds: None waits a little longer than one lifetime, after which a holder must be alive.
        Raises LockHeld, StreamUnavailable.
        """
        deadline = Deadline(self._lifetime * 1.5 if deadline_seconds is None else deadline_seconds)
        while True:
            asked = time.monotonic()
            answer = retrying(
                lambda: self._acquire_script(
                    keys=[self.key, self._fence_key], args=[self._owner, int(self._lifetime * 1000)]
                ),
                Deadline(max(deadline.remaining, 1.0)),
                f"take the role {self._role!r}",
            )
            token = answer[1].decode()
            if answer[0] == 1:
                break
            if deadline.expired:
                host, pid, _ = token.partition(" ")[2].rsplit(":", 2)
                raise LockHeld(
                    f"Another {self._role} of this run is alive (process {pid} on {host}); stop it first, "
                    "or give this run another directory."
                )
            time.sleep(min(0.1, max(0.01, answer[2] / 1000), deadline.remaining))
        self._token, self._lost, self._valid_until = token, False, asked + self._lifetime
        self._ended.clear()
        self._thread = threading.Thread(target=self._keep, name=f"lock-{self._role}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises LockLost unless the role is this process's. Asks Redis only where the last renewal is too long ago."""
        if self._token is not None and not self._lost and time.monotonic() >= self._valid_until:
            try:
                self._renew()
            except (redis.RedisError, StreamUnavailable) as error:
                raise LockLost(
                    f"The role {self._role!r} could not be renewed for {self._lifetime:g} s: {error}"
                ) from error
        if self._token is None or self._lost:
            raise LockLost(f"The role {self._role!r} of this run was taken over by another process; this one must end.")

    def release(self) -> None:
        """Gives the role back so that a successor need not wait. Idempotent; quiet where Redis is gone."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(self._lifetime)
            self._thread = None
        token, self._token = self._token, None
        if token is None:
            return
        try:
            self._release_script(keys=[self.key], args=[token])
        except redis.RedisError as error:
            logger.warning("The role %r was not given back (%s); it expires by itself.", self._role, error)

    def __enter__(self) -> ExclusiveLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep(self) -> None:
        while not self._ended.wait(self._lifetime / 3):
            try:
                self._renew()
            except redis.RedisError as error:
                # `check` decides what that means; the connection may come back in time.
                logger.warning("The role %r could not be renewed: %s", self._role, error)
            if self._lost:
                logger.error("The role %r was taken over by another process.", self._role)
                return

    def _renew(self) -> None:
        asked = time.monotonic()
        args = [self.token, self.fence, int(self._lifetime * 1000)]
        if self._renew_script(keys=[self.key, self._fence_key], args=args):
            self._valid_until = asked + self._lifetime
        else:
            self._lost = True
