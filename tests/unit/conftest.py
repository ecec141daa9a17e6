"""Unit tests stay in one process: real networks are the business of tests/network."""

import pytest


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_RUN__TRANSPORT", "memory")
