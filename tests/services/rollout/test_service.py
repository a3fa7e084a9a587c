"""What a worker tells the learner about itself."""

import socket

import pytest

from services.config import RolloutConfig
from services.rollout.service import advertised_host


@pytest.mark.parametrize(
    ("host", "advertise", "expected"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("10.0.0.7", None, "10.0.0.7"),
        ("0.0.0.0", None, socket.gethostname()),  # noqa: S104
        ("::", None, socket.gethostname()),
        ("0.0.0.0", "rollout-3", "rollout-3"),  # noqa: S104
    ],
)
def test_a_wildcard_address_is_never_advertised(host, advertise, expected):
    """In a container a learner that connects to 0.0.0.0 would call itself."""
    assert advertised_host(RolloutConfig(host=host, advertise=advertise)) == expected
