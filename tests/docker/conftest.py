"""Tests with real containers: `make test-docker` runs them; elsewhere they are skipped."""

import os
from collections.abc import Iterator

import pytest

from tests.docker.engine import Engine, NoEngine, engine, images

WANTED = "SPARK_TEST_DOCKER"


@pytest.fixture(scope="session")
def docker() -> Iterator[Engine]:
    """An engine that has the images."""
    if os.environ.get(WANTED) != "1":
        pytest.skip("containers are tested by `make test-docker`")
    try:
        with engine() as found:
            images(found)
            yield found
    except NoEngine as reason:
        pytest.skip(f"no container engine: {reason}")
