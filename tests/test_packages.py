from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_an_installation_without_this_directory_has_every_package():
    named = SETTINGS["packages"]
    held = {
        ".".join(path.relative_to(base).parts)
        for base, top in ((ROOT, "services"), (ROOT, "specroll_core"), (ROOT / "proto", "specroll"))
        for path in (base / top, *(base / top).rglob("*"))
        if path.is_dir() and any(path.glob("*.py"))
    }
    assert sorted(named) == sorted(held | {"specroll"})  # `specroll` itself holds the generated code's packages only


def test_and_every_file_that_is_not_python():
    named = {
        path
        for package, patterns in SETTINGS["package-data"].items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    held = {
        path
        for top in ("services", "specroll_core")
        for path in (ROOT / top).rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"}
    }
    assert named == held
