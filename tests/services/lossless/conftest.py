from __future__ import annotations

import pytest
import torch

from services.heads.target import TargetModel


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny products gain nothing from threads, and lose much where other processes keep the cores busy."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tiny_dir):
    return TargetModel(tiny_dir, torch.float32, torch.device("cpu"))
