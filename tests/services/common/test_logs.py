from __future__ import annotations

import logging
import sys

import pytest

from services.common.logs import RedactingFormatter, setup_logging


def test_log_lines_carry_the_service_and_no_secret():
    formatter = RedactingFormatter("learner", ["s3cret", "s3cret-longer"])
    try:
        raise ValueError("s3cret in a trace")
    except ValueError:
        record = logging.LogRecord(
            "x", logging.WARNING, "f", 1, "token %s at redis://u:pw@h:1 %s", ("s3cret-longer", "s3cret"), sys.exc_info()
        )
    text = formatter.format(record)
    assert "learner" in text
    assert "WARNING" in text
    assert "token *** at redis://***@h:1 ***" in text
    assert "s3cret" not in text
    assert "longer" not in text


def test_an_unknown_level_is_a_users_mistake():
    with pytest.raises(ValueError, match=r"logging\.level"):
        setup_logging("x", "loud")
