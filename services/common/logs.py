"""Log lines for the operator: one line each, with the service's name, and without secrets."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable

from services.common.credentials import known_secrets

_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]*:[^/\s]*@")


class RedactingFormatter(logging.Formatter):
    """Formats a record and takes known secrets and the credentials of URLs out of the finished text.

    A formatter and not a filter, because only the finished text holds the traceback too.
    """

    def __init__(self, service: str, secrets: Iterable[str] = ()) -> None:
        super().__init__(
            f"%(asctime)s {service:<8} %(levelname)-7s %(message)s  [%(name)s]",
            datefmt="%H:%M:%S",
        )
        # The longest first, so that a secret that contains another one leaves no rest behind.
        self._secrets = sorted({s for s in secrets if s}, key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        text = _URL_CREDENTIALS.sub("***@", super().format(record))
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def setup_logging(service: str, level: str = "info", *, secrets: Iterable[str] = ()) -> None:
    """Sends the root logger's lines to standard error in the operator's format.

    service: name shown in each line. secrets: taken out of every line, beside those in the environment.
    Replaces handlers that earlier calls or libraries have put on the root logger.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"logging.level must be debug, info, warning or error, not {level!r}.")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter(service, [*secrets, *known_secrets()]))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(number)
