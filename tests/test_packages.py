from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_an_installation_without_this_directory_has_every_package():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    held = {
        ".".join(path.relative_to(base).parts)
        for base, top in ((ROOT, "services"), (ROOT, "specroll_core"), (ROOT / "proto", "specroll"))
        for path in (base / top, *(base / top).rglob("*"))
        if path.is_dir() and any(path.glob("*.py"))
    }
    assert sorted(named) == sorted(held | {"specroll"})  # `specroll` itself holds the generated code's packages only
