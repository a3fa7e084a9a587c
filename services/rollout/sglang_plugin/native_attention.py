"""`tree_attention.cpp`: compiled for this machine's processor when an engine first starts, and called on tensors.

Needs a C++ compiler (`$CXX`, `c++` or `g++`). Without one, or where compiling fails, `attention.py` goes on in plain
PyTorch, which takes two to three times as long.
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
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.machine import cache_directory

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("tree_attention.cpp")
# -Wno-psabi: vectors of 16 floats are never passed to other code.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
_COMPILE_SECONDS = 120.0
_DTYPES = (torch.bfloat16, torch.float32)
_HEAD_SIZES = (32, 64, 96, 128)


@dataclass(frozen=True, slots=True)
class Queries:
    """What every layer of a forward has in common: `nodes` queries of each of B requests.

    requests: [B] int64, their rows of the slot table; lengths: [B] int64, the keys that all queries of a request see;
    trees: [B, nodes, nodes] bool, which of the `nodes` keys after these each query sees, or None where there are none.
    """

    requests: Tensor
    lengths: Tensor
    nodes: int
    trees: Tensor | None = None


def fits(dtype: torch.dtype, head_size: int, value_size: int) -> bool:
    """Whether there is code for heads of this kind."""
    return dtype in _DTYPES and head_size == value_size and head_size in _HEAD_SIZES


class NativeAttention:
    """The compiled function. Use `load`."""

    def __init__(self, library: Path) -> None:
        self._call = ctypes.CDLL(str(library)).specroll_tree_attention
        i, p, w = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
        self._call.argtypes = [i, i, p, p, p, p, p, w, p, p, p, i, i, i, i, ctypes.c_float, i]
        self._call.restype = i

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, queries: Queries, scale: float) -> Tensor:
        """q: [B * nodes, query heads, D]; keys, values: [slots, key heads, D], of q's type; table: [rows, context]
        int32, the slot of each position. Returns [B * nodes, query heads * D]."""
        q = q.contiguous()
        _, heads, size = q.shape
        requests, lengths, trees = queries.requests, queries.lengths, queries.trees
        assert all(x.is_contiguous() for x in (keys, values, requests, lengths))
        assert table.stride(1) == 1
        assert trees is None or trees.is_contiguous()
        assert {keys.dtype, values.dtype} == {q.dtype}
        assert (table.dtype, requests.dtype, lengths.dtype) == (torch.int32, torch.int64, torch.int64)
        assert q.shape[0] == len(requests) * queries.nodes
        out = q.new_empty(q.shape[0], heads * size)
        failed = self._call(
            q.dtype == torch.bfloat16,
            size,
            q.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            table.data_ptr(),
            table.stride(0),
            requests.data_ptr(),
            lengths.data_ptr(),
            None if trees is None else trees.data_ptr(),
            len(requests),
            queries.nodes,
            heads,
            keys.shape[1],
            scale,
            torch.get_num_threads(),
        )
        assert not failed, "asked for a kind of heads that `fits` denies"
        return out


@functools.cache
def load() -> NativeAttention | None:
    """None where it cannot be compiled here; the log says why."""
    try:
        return NativeAttention(_compiled())
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("attention runs in plain PyTorch, two to three times slower: %s", str(reason).strip()[-500:])
        return None


def _compiled() -> Path:
    """The library, made now unless an earlier start has left it. Raises OSError or SubprocessError."""
    compiler = _compiler()
    source = _SOURCE.read_bytes()
    made_of = [source, " ".join([*compiler, *_FLAGS]).encode(), _processor().encode()]
    name = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    library = cache_directory() / "native" / f"tree_attention-{name}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    # Two engines that start at once both compile: each rename leaves a whole file.
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        command = [*compiler, *_FLAGS, "-o", str(made), str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        made.replace(library)
    return library


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
