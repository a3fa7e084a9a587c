"""The edge of a service process: signals, logging, exit code."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from services.common.lifecycle import stop_on_signals
from services.common.logs import setup_logging

log = logging.getLogger(__name__)


def service_main(name: str, level: str, run: Callable[[threading.Event], None], *, secrets: Sequence[str] = ()) -> int:
    """Runs a service until it ends by itself or by a signal.

    Returns 0 when it completed or was stopped, 1 when it failed. ValueError, a user's mistake, passes through.
    """
    setup_logging(name, level, secrets=secrets)
    stop = threading.Event()
    stop_on_signals(stop)
    try:
        run(stop)
    except ValueError:
        raise
    except Exception:  # what went wrong is said here, and the exit code tells the supervisor
        log.exception("the %s service failed", name)
        return 1
    return 0
