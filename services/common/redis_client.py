"""Connecting to Redis (or Valkey): one place for time limits, retries, version and durability checks."""

from __future__ import annotations

import logging
import time
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from pydantic import SecretStr
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from services.common.credentials import REDIS_PASSWORD, InsecureError, is_loopback, read_secret, redact_url
from services.common.lifecycle import Deadline

logger = logging.getLogger(__name__)

# XAUTOCLAIM and XPENDING ... IDLE are of 6.2; 7.0 is the first whose XCLAIM forgets pending entries that were deleted.
MINIMUM_VERSION = (7, 0)
# Above the longest blocking read of the stream consumer (2 s), below what an operator takes for a hang.
SOCKET_TIMEOUT_SECONDS = 10.0
_HEALTH_CHECK_SECONDS = 5


class RedisUnavailable(ConnectionError):
    """Redis could not be reached, or answers in a way that no retry mends; one sentence, the URL redacted."""


def connect(
    url: SecretStr | str,
    *,
    deadline_seconds: float = 10.0,
    allow_insecure: bool = False,
    password: str | None = None,
) -> redis.Redis:
    """A checked, thread-safe client that answers in bytes.

    url: `redis://`, `rediss://` (TLS) or `unix://`. password: else that of the URL, else SPECROLL_REDIS_PASSWORD or the
    file named by SPECROLL_REDIS_PASSWORD_FILE. Waits up to `deadline_seconds` for a server that is starting
    or loading. Raises ValueError on a malformed URL, InsecureError on a server beyond this machine without a
    password, RedisUnavailable on all else.
    """
    text = url.get_secret_value() if isinstance(url, SecretStr) else url
    shown = redact_url(text)
    password = password or _password_of(text, shown) or read_secret(REDIS_PASSWORD)
    _refuse_insecure(text, shown, password, allow_insecure)
    client = redis.Redis.from_url(
        text,
        password=password,
        protocol=2,  # one shape of replies whatever the server speaks
        socket_timeout=SOCKET_TIMEOUT_SECONDS,
        socket_connect_timeout=min(SOCKET_TIMEOUT_SECONDS, max(deadline_seconds, 0.1)),
        socket_keepalive=True,
        health_check_interval=_HEALTH_CHECK_SECONDS,
        # A few quick ones for a connection that was dropped while idle. Longer outages are retried by the callers,
        # which know their deadlines and which of their commands may be sent twice.
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), 2),
    )
    try:
        _wait_for_answer(client, shown, Deadline(deadline_seconds))
        _check_version(client, shown)
        warn_when_not_durable(client, shown)
    except BaseException:
        client.close()
        raise
    return client


def warn_when_not_durable(client: redis.Redis, shown: str) -> bool:
    """Whether what the server acknowledged survives its death; logs a warning where it does not or cannot be known."""
    try:
        answer: Any = client.info("persistence")
    except redis.RedisError as error:
        logger.warning("Cannot see whether Redis at %s persists its data: %s", shown, error)
        return False
    if answer.get("aof_enabled"):
        return True
    logger.warning(
        "Redis at %s keeps no append-only file: what is in its queues is lost when it dies. "
        "Set appendonly yes, or leave redis.url empty for the embedded server.",
        shown,
    )
    return False


def _password_of(url: str, shown: str) -> str | None:
    try:
        parts = urlsplit(url)
        password = parts.password
        valid = parts.scheme in ("redis", "rediss", "unix") and (parts.port or True)
    except ValueError:
        valid, password = False, None
    if not valid:
        raise ValueError(f"redis.url must look like redis://HOST:PORT/0, rediss://... or unix://PATH, not {shown!r}.")
    return unquote(password) if password else None


def _refuse_insecure(url: str, shown: str, password: str | None, allow_insecure: bool) -> None:
    parts = urlsplit(url)
    if parts.scheme == "unix" or is_loopback(parts.hostname or "localhost") or password or allow_insecure:
        return
    raise InsecureError(
        f"Redis at {shown} is not on this machine and there is no password: set {REDIS_PASSWORD}, "
        "or security.allow_insecure = true on a network that you trust."
    )


def _wait_for_answer(client: redis.Redis, shown: str, deadline: Deadline) -> None:
    pause = 0.05
    while True:
        try:
            client.ping()
            return
        except (redis.AuthenticationError, redis.exceptions.AuthorizationError) as error:
            raise RedisUnavailable(
                f"Redis at {shown} refuses the password: check {REDIS_PASSWORD} or the URL ({error})."
            ) from error
        except (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError) as error:
            if deadline.expired:
                raise RedisUnavailable(
                    f"Redis at {shown} did not answer within {deadline.seconds:g} s: {error}"
                ) from error
        except redis.ResponseError as error:
            raise RedisUnavailable(f"Redis at {shown} refuses the connection: {error}") from error
        time.sleep(min(pause, deadline.remaining))
        pause = min(2 * pause, 0.5)


def _check_version(client: redis.Redis, shown: str) -> None:
    answer: Any = client.info("server")
    version = str(answer.get("redis_version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < MINIMUM_VERSION:
        raise RedisUnavailable(
            f"Redis at {shown} is version {version}; at least {MINIMUM_VERSION[0]}.{MINIMUM_VERSION[1]} is needed."
        )
