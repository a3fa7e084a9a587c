"""Compiling, and what happens where there is no compiler."""

from __future__ import annotations

import logging

import pytest

from services.rollout.sglang_plugin import native_code


@pytest.mark.parametrize("compiler", ["/bin/false", "/nowhere/c++"])
def test_without_a_compiler_the_log_says_so_and_pytorch_goes_on(monkeypatch, tmp_path, caplog, compiler):
    monkeypatch.setenv("SPECROLL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(native_code.shutil, "which", lambda name: name if name == "/bin/false" else None)
    with caplog.at_level(logging.WARNING):
        assert native_code.library.__wrapped__("tree_attention") is None
    assert "plain PyTorch" in caplog.text
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("name", ["candidates", "round_uniforms", "tree_attention", "tree_growth", "tree_walk"])
def test_what_was_compiled_once_is_not_compiled_again(monkeypatch, tmp_path, name):
    monkeypatch.setenv("SPECROLL_CACHE", str(tmp_path))
    made = native_code.compiled(name)
    monkeypatch.setattr(native_code.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert native_code.compiled(name) == made
    monkeypatch.setattr(native_code, "_processor", lambda: "another machine's")
    with pytest.raises(pytest.fail.Exception):
        native_code.compiled(name)
