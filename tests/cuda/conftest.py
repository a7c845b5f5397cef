"""Tests on a CUDA device: the device of all of them, and what every one of them finds before it starts.

``pytest -m gpu -n 8``. They are skipped where torch has no CUDA device. To look for mistakes in the tests themselves without
one, ``SINKLAB_TEST_DEVICE=cpu`` runs them on the CPU, where a test that is about CUDA alone still skips itself.
"""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of every test in this folder."""
    name = os.environ.get("SINKLAB_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch has no CUDA device")
    return torch.device(name)


@pytest.fixture
def cuda(device) -> torch.device:
    """The same, for tests of what only CUDA has."""
    if device.type != "cuda":
        pytest.skip("it is about CUDA, and SINKLAB_TEST_DEVICE is another device")
    return device


@pytest.fixture(autouse=True)
def fresh_graphs_and_plain_float32(device):
    """No compiled graph of another test, and float32 products in float32: the tolerances are of that arithmetic."""
    torch._dynamo.reset()
    torch.set_num_threads(2)  # there are as many workers as the CPU has cores for, and each computes what is expected on it
    before = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False  # on by default, with 10 bits for the products of convolutions
    yield
    torch.set_float32_matmul_precision(before)
    torch.backends.cudnn.allow_tf32 = convolutions
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
