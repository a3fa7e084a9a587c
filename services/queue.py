"""The run's queue as the configuration describes it."""

from __future__ import annotations

import redis

from services.common import redis_client
from services.common.streams import StreamLimits
from services.config import Config


def connect(config: Config, *, deadline_seconds: float | None = None, password: str | None = None) -> redis.Redis:
    """A checked client for `redis.url`. Raises redis_client.RedisUnavailable or ValueError, one sentence each."""
    return redis_client.connect(
        config.redis.url,
        deadline_seconds=config.redis.connect_timeout_seconds if deadline_seconds is None else deadline_seconds,
        allow_insecure=config.security.allow_insecure,
        password=password,
    )


def limits(config: Config) -> StreamLimits:
    return StreamLimits(
        max_entries=config.redis.max_groups,
        max_bytes=config.redis.max_bytes,
        max_deliveries=config.redis.max_deliveries,
        reclaim_idle_seconds=config.redis.reclaim_idle_seconds,
    )
