"""The C++ functions under `native/`: compiled for this machine's processor when an engine first starts, and kept.

Needs a C++ compiler (`$CXX`, `c++` or `g++`). Without one, or where compiling fails, their callers go on in plain
PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.machine import cache_directory

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).with_name("native")
# -Wno-psabi: vectors of 16 floats are never passed to other code.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
# Trees are those of the Python code where every operation on doubles rounds as there.
_OWN_FLAGS = {"tree_growth": ("-ffp-contract=off",)}
_COMPILE_SECONDS = 120.0


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """`native/NAME.cpp`. None where it cannot be compiled here; the log says why."""
    try:
        return ctypes.CDLL(str(compiled(name)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("%s runs in plain PyTorch and Python, several times slower: %s", name, str(reason).strip()[-500:])
        return None


def compiled(name: str) -> Path:
    """The library's file, made now unless an earlier start has left it. Raises OSError or SubprocessError."""
    compiler, flags = _compiler(), (*_FLAGS, *_OWN_FLAGS.get(name, ()))
    source = _SOURCES / f"{name}.cpp"
    made_of = [path.read_bytes() for path in (source, *sorted(_SOURCES.glob("*.h")))]
    made_of += [" ".join([*compiler, *flags]).encode(), _processor().encode()]
    made = cache_directory() / "native" / f"{name}-{hashlib.sha256(b'|'.join(made_of)).hexdigest()[:16]}.so"
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    # Two engines that start at once both compile: each rename leaves a whole file.
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        fresh = Path(scratch) / made.name
        command = [*compiler, *flags, "-o", str(fresh), str(source)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        fresh.replace(made)
    return made


def _compiler() -> Sequence[str]:
    names = os.environ["CXX"].split() if os.environ.get("CXX") else ["c++"]
    for first in (names[0], "g++", "clang++"):
        if found := shutil.which(first):
            return [found, *names[1:]]
    raise FileNotFoundError("there is no C++ compiler")


def _processor() -> str:
    """What `-march=native` depends on: a cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags"))
