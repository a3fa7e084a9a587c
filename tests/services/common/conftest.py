"""A real server, one per module; every test takes keys of its own."""

from __future__ import annotations

import uuid

import pytest

from services.common.embedded_redis import EmbeddedRedis
from services.common.keys import RunKeys
from services.common.redis_client import connect


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    client = connect(server.url, password=server.password)
    yield client
    client.close()


@pytest.fixture
def run_keys():
    return RunKeys(f"test-{uuid.uuid4().hex}")
