"""Shared by all tests: the device under test comes from the environment (SPARK_DEVICE, default cpu)."""

import os
import signal

import pytest
import torch

torch.set_num_threads(1)
# Started in the background: what tests start would not hear Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def device() -> torch.device:
    return torch.device(os.environ.get("SPARK_DEVICE", "cpu"))
