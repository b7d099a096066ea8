"""What all tests of the agent need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from openrecycle.agent.transport.communicator import RendezvousStore
from tests.agent.launches import warm


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As workers have by default; more threads than free cores make small kernels wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _warm(request: pytest.FixtureRequest) -> None:
    """Else the first job of a test process starts a server that lacks what the next one's workers import."""
    if request.node.get_closest_marker("processes"):
        warm()


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    """Where the workers of a generation meet."""
    store = RendezvousStore()
    yield store
    store.close()
