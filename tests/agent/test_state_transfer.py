"""A stage's state over real connections: whole, or refused with a sentence."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from agent.communicator import Groups
from agent.gradients import GradientSum
from agent.optimizer import StageOptimizer
from agent.state_transfer import StateTransferError, receive_state, send_state
from agent.timeouts import Timeouts
from planner.job import Worker

A, B = Worker(0, 0), Worker(1, 0)


def _stage(width: int = 3) -> StageOptimizer:
    torch.manual_seed(0)
    module = nn.Linear(width, 2)
    return StageOptimizer(module, torch.optim.AdamW(module.parameters()), GradientSum(module.parameters(), terms=4))


def _exchange(source: StageOptimizer, target: StageOptimizer) -> None:
    """Sends from A to B, two threads over one store; raises what the receiver raises."""
    store: Any = torch.distributed.HashStore()
    failures: list[BaseException] = []

    def side(me: Worker, act: Callable[[Groups], None]) -> None:
        try:
            act(Groups(store, 1, me, [A, B], Timeouts(form=20.0, transfer=20.0)))
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=side, args=(A, lambda groups: send_state(groups, source, B))),
        threading.Thread(target=side, args=(B, lambda groups: receive_state(groups, target, A))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if failures:
        raise failures[0]


def test_it_arrives_bit_by_bit() -> None:
    source, target = _stage(), _stage()
    with torch.no_grad():
        source.module.weight.add_(1.0)  # type: ignore[operator, union-attr]
    source.committed = 7
    _exchange(source, target)
    assert target.parameters_sha256() == source.parameters_sha256() and target.committed == 7


def test_a_damaged_state_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = _stage(), _stage()
    header, body = source.dump()
    damaged = body.clone()
    damaged[5] ^= 1
    monkeypatch.setattr(source, "dump", lambda: (header, damaged))
    before = target.parameters_sha256()
    with pytest.raises(StateTransferError, match="the state from W0_0 can't be used"):
        _exchange(source, target)
    assert target.parameters_sha256() == before


def test_a_state_of_another_model_is_refused() -> None:
    with pytest.raises(StateTransferError, match="the state from W0_0 can't be used"):
        _exchange(_stage(4), _stage(3))
