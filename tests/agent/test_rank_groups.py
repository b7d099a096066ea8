"""The group of one worker's ranks: a wait in it ends when it is cancelled, and its connections can be made anew."""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import distributed

from openrecycle.agent.config.timeouts import Timeouts
from openrecycle.agent.transport import ranks as rank_groups
from openrecycle.agent.transport.ranks import Ranks
from tests.agent.launches import warm

pytestmark = pytest.mark.processes

TIMEOUTS = Timeouts(form=30.0, transfer=200.0, group=300.0)


def _one(rank: int, folder: str, collective: str, to: Connection) -> None:
    ranks = Ranks.begin(rank, 2, f"{folder}/store", TIMEOUTS)
    second = distributed.PrefixStore("second", distributed.FileStore(f"{folder}/second", 2))
    if rank == 0:
        # As where gloo has forgotten a send: nothing of its own wakes the wait.
        rank_groups.wake_all = lambda group, rank: None  # type: ignore[assignment]
        threading.Timer(0.3, ranks.cancel).start()
        began = time.monotonic()
        values = torch.ones(4)
        try:
            if collective == "gather":
                ranks.gather(values)
            elif collective == "all_reduce":
                distributed.all_reduce(values)
            else:
                distributed.reduce_scatter_single(torch.zeros(2), values)
        except RuntimeError as error:
            to.send((ranks.broke(error), time.monotonic() - began))
    ranks.connect(second, TIMEOUTS)
    values = torch.tensor([1.0 + rank])
    distributed.all_reduce(values)
    to.send(float(values))
    to.poll(60)  # until all is compared: an end closes connections


@pytest.mark.parametrize("collective", ["gather", "all_reduce", "reduce_scatter"])
def test_a_wait_that_nothing_wakes_ends_when_the_group_is_cancelled(collective: str, tmp_path: Path) -> None:
    warm()
    context = multiprocessing.get_context("forkserver")
    pipes = []
    for rank in (0, 1):
        mine, theirs = context.Pipe()
        context.Process(target=_one, args=(rank, str(tmp_path), collective, theirs), daemon=True).start()
        pipes.append(mine)
    assert pipes[0].poll(60)
    broke, seconds = pipes[0].recv()
    assert broke and seconds < 30, "a tenth of the group's time-out"
    for pipe in pipes:
        assert pipe.poll(60) and pipe.recv() == 3.0
    for pipe in pipes:
        pipe.send("end")
