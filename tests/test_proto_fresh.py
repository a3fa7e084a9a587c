"""The committed stubs are those that the .proto files make."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROTO = Path(__file__).parent.parent / "proto"


def test_the_committed_stubs_are_fresh(tmp_path):
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    assert sources
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", *outputs, *sources], check=True, timeout=60
    )
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*.py*")}
    stubs = [path for path in PROTO.rglob("*_pb2*.py*") if "__pycache__" not in path.parts]
    committed = {path.relative_to(PROTO): path.read_text() for path in stubs}
    assert sorted(committed) == sorted(made)
    stale = [str(path) for path in sorted(made) if made[path] != committed[path]]
    assert not stale, f"regenerate the stubs with `make proto`: {stale}"
