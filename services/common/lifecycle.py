"""How a service's process lives and ends: deadlines, signals, death with its parent, files written whole.

Every wait in the services goes through `Deadline` or `wait_until`, so that none is without an end and a message.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Loaded before any fork: a child of a process with threads must neither import nor allocate much before exec.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class DeadlineExceeded(TimeoutError):
    """A bounded wait came to its end; the message says what was awaited and for how long."""


class Deadline:
    """A moment on the monotonic clock by which something must have happened.

    seconds: length of the wait, 0 or more; math.inf never expires and is for tests of the helper alone.
    """

    def __init__(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"A deadline must be 0 or more seconds away, not {seconds}.")
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._end

    def check(self, what: str) -> None:
        """Raises DeadlineExceeded, naming `what`, once the deadline has passed."""
        if self.expired:
            raise DeadlineExceeded(f"Gave up waiting for {what} after {self.seconds:g} s.")


def wait_until(
    predicate: Callable[[], object],
    deadline: Deadline | float,
    what: str,
    *,
    stop: threading.Event | None = None,
    poll_seconds: float = 0.05,
) -> bool:
    """Polls `predicate` until it is true.

    Returns True, or False where `stop` was set first. The predicate is tried at least once.
    Raises DeadlineExceeded, naming `what`.
    """
    deadline = deadline if isinstance(deadline, Deadline) else Deadline(deadline)
    pause = stop or threading.Event()
    while not predicate():
        deadline.check(what)
        if pause.wait(min(poll_seconds, deadline.remaining)):
            return False
    return True


def stop_on_signals(stop: threading.Event) -> None:
    """The first SIGINT or SIGTERM sets `stop` for an orderly end; the second exits at once with 128 + its number.

    Must be called in the main thread, as Python's signal handlers are installed there only.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if stop.is_set():
            # os._exit, because an orderly exit is what hangs when somebody signals twice.
            os.write(2, f"{name} again: leaving at once.\n".encode())
            os._exit(128 + number)
        # os.write, because logging takes locks that the interrupted thread may hold.
        os.write(2, f"{name}: finishing what is in progress; send it again to leave at once.\n".encode())
        stop.set()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)


def die_with_parent(number: int = signal.SIGTERM, *, parent_pid: int | None = None) -> None:
    """Asks the kernel to send `number` to this process when its parent ends, even by SIGKILL (prctl(2)).

    Does nothing where the system is not Linux. parent_pid: who the parent must still be; where it has already
    ended, this process ends now. The kernel watches the *thread* that forked: start children that use this from
    a thread that lives as long as they should, best the main thread.
    """
    if _LIBC is None:
        return
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(128 + number)


def child_dies_with_me(number: int = signal.SIGTERM) -> Callable[[], None]:
    """`preexec_fn` for subprocess.Popen: the child gets `number` when this process ends, however it ends."""
    parent = os.getpid()
    return lambda: die_with_parent(number, parent_pid=parent)


def process_is_alive(pid: int) -> bool:
    """Whether a process of this number exists on this machine, zombies not counted."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return sys.platform != "linux"


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago. Prefer binding port 0 where the server can report its choice."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen on this port now."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
        return True


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644, fsync: bool = True) -> None:
    """Replaces a file so that a reader sees the old content or the new, also after a kill or a power cut.

    The temporary file lies beside the target, because a rename is atomic inside one file system only.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if fsync:
        fsync_directory(path.parent)


def write_json(path: Path, value: Mapping[str, Any], *, mode: int = 0o644, fsync: bool = True) -> None:
    """`write_bytes` of indented JSON with sorted keys. Raises ValueError on numbers that are not finite."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    write_bytes(path, text.encode() + b"\n", mode=mode, fsync=fsync)


def fsync_directory(path: Path) -> None:
    """Makes renames inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite_or_none(value: float) -> float | None:
    """The number itself, or None where JSON could not carry it."""
    return value if math.isfinite(value) else None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
