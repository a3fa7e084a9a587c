"""Secrets and who may be talked to without them.

Secrets come from an environment variable, or from the file that the same variable with `_FILE` names, as
container secrets are mounted. They are never logged: `redact_url` for addresses, `services/common/logs.py` for lines.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

REDIS_PASSWORD = "SPECROLL_REDIS_PASSWORD"  # noqa: S105  the variable's name, not its value
GRPC_TOKEN = "SPECROLL_GRPC_TOKEN"  # noqa: S105
TLS_CA = "SPECROLL_TLS_CA"
TLS_CERT = "SPECROLL_TLS_CERT"
TLS_KEY = "SPECROLL_TLS_KEY"


class InsecureError(ValueError):
    """An address beyond this machine without the credentials that it needs; the message says how to give them."""


def read_secret(variable: str) -> str | None:
    """The secret in `variable`, or in the file named by `variable_FILE`; None where neither is set.

    Raises ValueError where both are set, the file cannot be read, or the secret is empty.
    """
    direct, file = os.environ.get(variable), os.environ.get(f"{variable}_FILE")
    if direct is not None and file is not None:
        raise ValueError(f"Set {variable} or {variable}_FILE, not both.")
    if file is not None:
        try:
            direct = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ValueError(f"The file {file!r} named by {variable}_FILE cannot be read: {reason}.") from error
    if direct == "":
        raise ValueError(f"{variable} is set but empty: unset it or give it a value.")
    return direct


def known_secrets() -> list[str]:
    """The secrets of this process's environment, for redaction. A secret that cannot be read is none."""
    found = []
    for variable in (REDIS_PASSWORD, GRPC_TOKEN):
        try:
            secret = read_secret(variable)
        except ValueError:
            continue
        if secret:
            found.append(secret)
    return found


def redact_url(url: str) -> str:
    """The URL with user name and password replaced by `***`; what cannot be parsed is replaced whole."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "***"
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


def is_loopback(host: str) -> bool:
    """Whether the host is this machine's loopback interface by its name or number. Names are not looked up."""
    if host in ("localhost", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
