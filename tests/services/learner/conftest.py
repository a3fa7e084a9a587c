import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny products gain nothing from threads, and lose much where other processes keep the cores busy."""
    torch.set_num_threads(1)
