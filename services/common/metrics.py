"""Numbers of a service: one JSON line per record, Prometheus at `/metrics`, TensorBoard where it is wanted.

Names are paths of lower-case words: `off_policy/in_queue/max`. In Prometheus that is
`specroll_off_policy_in_queue_max`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from services.common.lifecycle import finite_or_none

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z0-9][a-z0-9_]*(/[a-z0-9_@.]+)*")
_RESERVED = frozenset({"kind", "step", "time"})


class JsonlWriter:
    """Appends records to a file, one line each, flushed, so that a reader follows and a kill loses none.

    A line that an earlier process left unfinished is cut off. Not for several processes at once.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_unfinished_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, record: Mapping[str, Any]) -> None:
        """Raises ValueError on numbers that JSON does not have."""
        line = json.dumps(record, allow_nan=False)
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class Metrics:
    """A service's records and counters.

    directory: gets `SERVICE.jsonl`, and TensorBoard's files under `tensorboard/SERVICE`. Safe to use from several
    threads.
    """

    def __init__(self, directory: Path, *, service: str, tensorboard: bool = False) -> None:
        self.registry = CollectorRegistry()
        self._service = service
        self._jsonl = JsonlWriter(directory / f"{service}.jsonl")
        self._board = _board(directory / "tensorboard" / service) if tensorboard else None
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._totals: dict[str, float] = {}
        self._lock = threading.Lock()
        self._server: Any = None

    def write(self, kind: str, step: int, values: Mapping[str, float], facts: Mapping[str, Any] | None = None) -> None:
        """One record: a JSON line {kind, step, time, *values, *counters, *facts}, and gauges of the latest values.

        facts: JSON values that are no numbers, for the line alone.

        Numbers that are not finite are written as null and counted in `metrics/non_finite/total`.
        Raises ValueError on a name that is no path or is one of the record's own.
        """
        for name in (*values, *(facts or {})):
            _check_name(name)
        clean = {name: finite_or_none(float(value)) for name, value in values.items()}
        bad = sorted(name for name, value in clean.items() if value is None)
        if bad:
            self.count("metrics/non_finite/total", len(bad))
            logger.warning("Not finite at step %d: %s", step, ", ".join(bad))
        record = {
            "kind": kind,
            "step": step,
            "time": round(time.time(), 3),
            **self.counters(),
            **clean,
            **(facts or {}),
        }
        self._jsonl.write(record)
        for name, value in values.items():
            self.gauge(name).set(value)
            if self._board is not None and math.isfinite(value):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def count(self, name: str, amount: float = 1) -> None:
        """Adds to a counter, which stands in every later record. By custom its name ends in `/total`."""
        _check_name(name)
        with self._lock:
            counter = self._counters.get(name)
            if counter is None:
                exposed = _prometheus_name(name).removesuffix("_total")
                counter = self._counters[name] = Counter(exposed, name, registry=self.registry)
            self._totals[name] = self._totals.get(name, 0) + amount
        counter.inc(amount)

    def counters(self) -> dict[str, float]:
        """All counters so far."""
        with self._lock:
            return dict(self._totals)

    def gauge(self, name: str) -> Gauge:
        """The Prometheus gauge of a name, to be set, or bound to a function with `set_function`."""
        _check_name(name)
        with self._lock:
            gauge = self._gauges.get(name)
            if gauge is None:
                gauge = self._gauges[name] = Gauge(_prometheus_name(name), name, registry=self.registry)
            return gauge

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """For a service's edge alone: an exception inside is logged with its trace and counted in `errors/WHAT/total`.

        So a broad `except` is never silent. what: a word of a metric's name.
        """
        try:
            yield
        except Exception:
            logger.exception("%s failed", what)
            self.count(f"errors/{what}/total")

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Serves this registry at http://HOST:PORT/metrics from a thread; returns the port, for 0 the chosen one."""
        self._server = serve_metrics(port, host, self.registry)
        return int(self._server.server_port)

    def close(self) -> None:
        """Ends writers and the HTTP server. Idempotent."""
        self._jsonl.close()
        if self._board is not None:
            self._board.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def serve_metrics(port: int, host: str = "127.0.0.1", registry: CollectorRegistry | None = None) -> Any:
    """Serves a registry, the process's own by default, from a thread; returns the HTTP server (`server_port`,
    `shutdown`).

    Raises ValueError where the port cannot be had.
    """
    try:
        if registry is None:
            server, _ = start_http_server(port, host)
        else:
            server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise ValueError(f"Cannot serve metrics on port {port} of {host}: {error.strerror or error}.") from error
    return server


def _board(directory: Path) -> Any:
    # Late: it takes a second and is seldom wanted.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory))


def _check_name(name: str) -> None:
    if name in _RESERVED or not _NAME.fullmatch(name):
        raise ValueError(
            f"A metric's name must be a path of lower-case words such as 'off_policy/max', other than "
            f"{', '.join(sorted(_RESERVED))}; not {name!r}."
        )


def _prometheus_name(name: str) -> str:
    return "specroll_" + re.sub(r"[^a-z0-9_]", "_", name)


def _cut_unfinished_line(path: Path) -> None:
    try:
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            at, tail = size, b""
            while at > 0 and b"\n" not in tail:
                at = max(0, at - 65_536)
                file.seek(at)
                tail = file.read(size - at)
            file.truncate(at + tail.rfind(b"\n") + 1)
    except FileNotFoundError:
        return
