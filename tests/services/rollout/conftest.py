from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=[1, 2], ids=lambda n: f"{n} threads")
def threads(request):
    """PyTorch with one and with two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)
