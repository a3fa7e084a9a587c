"""What this machine has: processors to share between an engine and a learner, memory, and a place for what is kept."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

# What oneDNN, through which PyTorch multiplies on x86, asks for before it multiplies in bfloat16, and the name of the
# extension on ARM. Without, products fall back to loops that take eight times as long as in float32.
_BFLOAT16_FLAGS = ({"avx512f", "avx512bw", "avx512vl", "avx512dq"}, {"bf16"})
_CPU_INFO = Path("/proc/cpuinfo")
_ACCELERATORS = ("nvidia[0-9]*", "kfd")

# malloc.h: M_MMAP_THRESHOLD (at most 32 MB), M_TRIM_THRESHOLD and M_TOP_PAD.
_MALLOC_SETTINGS = ((-3, 2**25), (-1, 2**30), (-2, 2**26))


def cores() -> list[int]:
    """The processors that this process may use."""
    return sorted(os.sched_getaffinity(0))


def half_of_the_cores() -> int:
    return max(1, len(cores()) // 2)


def cache_directory() -> Path:
    """`$SPECROLL_CACHE`, or `~/.cache/specroll` where the variable is not set."""
    return Path(os.environ.get("SPECROLL_CACHE") or Path.home() / ".cache" / "specroll").expanduser()


def limit_threads(threads: int, cpus: Sequence[int]) -> None:
    """Gives this process and its children their own threads, 0 for half of the cores, and processors where named.

    OpenMP's threads spin while they wait: an engine and a learner that each start one per core hold each other
    up. Call it before torch is imported.
    """
    count = threads or half_of_the_cores()
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(count)
    if cpus:
        missing = set(cpus) - set(cores())
        if missing:
            raise ValueError(f"cpus names processors that this machine does not offer: {sorted(missing)}")
        os.sched_setaffinity(0, cpus)


def computing_dtype(cpu_info: Path = _CPU_INFO, devices: Path = Path("/dev")) -> Literal["bfloat16", "float32"]:
    """bfloat16 where a GPU or this processor multiplies in it, else float32.

    Does not import torch, which takes seconds and is not needed by everything that reads a configuration.
    """
    if any(any(devices.glob(pattern)) for pattern in _ACCELERATORS):
        return "bfloat16"
    try:
        text = cpu_info.read_text()
    except OSError:
        return "bfloat16"
    flags = {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    return "bfloat16" if any(wanted <= flags for wanted in _BFLOAT16_FLAGS) else "float32"


def keep_freed_memory() -> None:
    """Lets this process keep the memory that it frees, up to a gigabyte, for its next tensors.

    By default tensors of megabytes are mapped and zeroed by the system each time: of a step of sampling or training on
    a CPU that is a seventh. Does nothing where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    for parameter, value in _MALLOC_SETTINGS:
        mallopt(parameter, value)


def quiet_libraries() -> None:
    """No progress bars in a service's log. Call it before transformers is imported, which reads the variable once."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
