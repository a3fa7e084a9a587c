"""The edge of a service process: signals, logging, exit code."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from services.common.lifecycle import stop_on_signals
from services.common.logs import setup_logging
from services.config_loader import ConfigError

log = logging.getLogger(__name__)


def service_main(name: str, level: str, build: Callable[[threading.Event], Callable[[], None]]) -> int:
    """Builds a service and runs what `build` returns until it ends by itself or by a signal.

    Returns 0 when it completed or was stopped, 1 when it failed. What a user can put right passes through: any
    ValueError while building, and a ConfigError later, when a peer refuses the configuration.
    """
    setup_logging(name, level)
    stop = threading.Event()
    stop_on_signals(stop)
    try:
        run = build(stop)
    except ValueError:
        raise
    except Exception:
        log.exception("the %s service could not start", name)
        return 1
    try:
        run()
    except ConfigError:
        raise
    except Exception:  # what went wrong is said here, and the exit code tells the supervisor
        log.exception("the %s service failed", name)
        return 1
    return 0
