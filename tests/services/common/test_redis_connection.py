from __future__ import annotations

import os
import socket
import stat

import pytest
from pydantic import SecretStr

from services.common import credentials
from services.common.credentials import InsecureError
from services.common.embedded_redis import EmbeddedRedis, EmbeddedRedisError, recorded_connection
from services.common.keys import RunKeys
from services.common.lifecycle import free_port
from services.common.redis_client import RedisUnavailable, connect, warn_when_not_durable


def test_connects_with_the_password_from_the_environments_file(server, monkeypatch):
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    client = connect(SecretStr(server.url))
    assert client.ping()
    client.close()


def test_a_wrong_password_is_named_and_not_shown(server):
    with pytest.raises(RedisUnavailable, match="refuses the password") as caught:
        connect(server.url.replace("127.0.0.1", ":verysecret@127.0.0.1"))
    assert "verysecret" not in str(caught.value)
    with pytest.raises(RedisUnavailable, match="refuses the password"):
        connect(server.url)


def test_an_absent_server_is_reported_within_the_deadline():
    with pytest.raises(RedisUnavailable, match=r"Redis at redis://\*\*\*@127.0.0.1:\d+ did not answer within 0.2 s"):
        connect(f"redis://:secret@127.0.0.1:{free_port()}", deadline_seconds=0.2)


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis://h:notaport"])
def test_a_malformed_url_is_a_users_mistake(url):
    with pytest.raises(ValueError, match=r"redis\.url must look like"):
        connect(url)


def test_a_server_elsewhere_needs_a_password():
    with pytest.raises(InsecureError, match="SPECROLL_REDIS_PASSWORD"):
        connect("redis://redis.example:6379")


def test_a_server_without_an_append_only_file_is_warned_about(server, client, caplog):
    assert warn_when_not_durable(client, server.url)
    client.config_set("appendonly", "no")
    try:
        assert not warn_when_not_durable(client, server.url)
    finally:
        client.config_set("appendonly", "yes")
    assert "keeps no append-only file" in caplog.text


def test_the_embedded_server_keeps_its_secret_and_evicts_nothing(server, client):
    directory = server._dir
    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    assert client.config_get("appendfsync") == {"appendfsync": "always"}
    for name in ("password", "redis.conf"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    with open(f"/proc/{server.pid}/cmdline", "rb") as file:
        assert server.password.encode() not in file.read()


def test_the_embedded_server_starts_again_on_its_data(tmp_path):
    directory = tmp_path / 'a directory with "quotes"'
    server = EmbeddedRedis(directory, fsync="always")
    with server:
        client = connect(server.url, password=server.password)
        client.set("k", "v")
        client.close()
        port = server.port
    with EmbeddedRedis(directory) as again:
        assert again.port == port
        client = connect(again.url, password=again.password)
        assert client.get("k") == b"v"
        client.close()
    again.stop()


def test_a_running_server_is_found_from_outside_and_a_stopped_one_is_not(tmp_path):
    assert recorded_connection(tmp_path / "never") is None
    with EmbeddedRedis(tmp_path) as server:
        assert recorded_connection(tmp_path) == (server.url, server.password)
    assert recorded_connection(tmp_path) is None


def test_a_taken_port_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedRedisError, match=f"Port {port} on 127.0.0.1 is in use"):
            EmbeddedRedis(tmp_path, port=port).start()


def test_secrets_come_from_a_variable_or_a_file_but_not_both(tmp_path, monkeypatch):
    monkeypatch.delenv("SPECROLL_GRPC_TOKEN", raising=False)
    assert credentials.read_secret("SPECROLL_GRPC_TOKEN") is None
    file = tmp_path / "token"
    file.write_text("from-file\n")
    monkeypatch.setenv("SPECROLL_GRPC_TOKEN_FILE", str(file))
    assert credentials.read_secret("SPECROLL_GRPC_TOKEN") == "from-file"
    monkeypatch.setenv("SPECROLL_GRPC_TOKEN", "direct")
    with pytest.raises(ValueError, match="not both"):
        credentials.read_secret("SPECROLL_GRPC_TOKEN")
    monkeypatch.delenv("SPECROLL_GRPC_TOKEN_FILE")
    assert credentials.read_secret("SPECROLL_GRPC_TOKEN") == "direct"
    monkeypatch.setenv("SPECROLL_GRPC_TOKEN", "")
    with pytest.raises(ValueError, match="set but empty"):
        credentials.read_secret("SPECROLL_GRPC_TOKEN")
    monkeypatch.delenv("SPECROLL_GRPC_TOKEN")
    monkeypatch.setenv("SPECROLL_GRPC_TOKEN_FILE", os.devnull + "/no")
    with pytest.raises(ValueError, match="cannot be read"):
        credentials.read_secret("SPECROLL_GRPC_TOKEN")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:p%40ss@h:1/0", "redis://***@h:1/0"),
        ("redis://:pa@ss@h:1", "redis://***@h:1"),
        ("redis://h:1", "redis://h:1"),
    ],
)
def test_urls_are_shown_without_their_secrets(url, shown):
    assert credentials.redact_url(url) == shown


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),  # noqa: S104
        ("10.0.0.1", False),
        ("127.0.0.1.example", False),
    ],
)
def test_loopback_is_known_by_name_and_number(host, loopback):
    assert credentials.is_loopback(host) is loopback


def test_keys_share_one_slot_and_a_bad_run_id_is_refused():
    keys = RunKeys("run-1")
    assert {keys.trajectories.stream, keys.feedback.dead, keys.lock("learner"), keys.fence("learner")} == {
        "specroll:{run-1}:trajectories",
        "specroll:{run-1}:feedback:dead",
        "specroll:{run-1}:lock:learner",
        "specroll:{run-1}:fence:learner",
    }
    with pytest.raises(ValueError, match="run id"):
        RunKeys("a}b")
