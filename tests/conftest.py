"""Shared by all tests: the device under test comes from the environment (SPARK_DEVICE, default cpu)."""

import os

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def device() -> torch.device:
    return torch.device(os.environ.get("SPARK_DEVICE", "cpu"))
