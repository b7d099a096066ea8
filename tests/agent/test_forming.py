"""How long a worker waits for the others of an epoch."""

from __future__ import annotations

from datetime import timedelta

import pytest

from agent.communicator import Communicator
from agent.timeouts import Timeouts
from agent.transport.group import TransferError
from planner.job import Worker

TIMEOUTS = Timeouts(form=1.0, transfer=60.0, group=90.0)


class NobodyComes:
    """A store at which the others are not ready in time."""

    def __init__(self) -> None:
        self.waited: list[timedelta] = []

    def add(self, key: str, amount: int) -> int:
        return amount

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.waited.append(timeout)
        raise RuntimeError("wait timeout")


@pytest.mark.parametrize(("at_boundary", "seconds"), [(False, TIMEOUTS.form), (True, TIMEOUTS.transfer)])
def test_who_joins_waits_for_the_iteration_in_hand(
    at_boundary: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long one takes: to give up would interrupt it."""
    communicator, store = Communicator(TIMEOUTS), NobodyComes()
    monkeypatch.setattr(communicator._stores, "connect", lambda address, timeout: store)
    me, peer = Worker(0, 0), Worker(1, 0)
    with pytest.raises(TransferError, match="epoch 2 did not come together"):
        communicator.form(2, me, [me, peer], ("127.0.0.1", 1), at_boundary=at_boundary)
    assert store.waited == [timedelta(seconds=seconds)]
