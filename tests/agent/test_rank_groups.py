"""The group of one worker's ranks: a wait in it ends when it is cancelled, and its connections can be made anew."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import distributed

from openrecycle.agent.config.options import Timeouts
from openrecycle.agent.transport import ranks as rank_groups
from openrecycle.agent.transport.ranks import Ranks
from tests.agent.launches import warm
from tests.golden import golden

pytestmark = pytest.mark.processes

TIMEOUTS = Timeouts(form=30.0, transfer=200.0, group=300.0)


def _one(rank: int, folder: str, to: Connection, collective: str, made_ahead: bool) -> None:
    shape = (2, 1) if collective == "of a line" else ()
    with torch.device("meta"):  # whose default device is another
        ranks = Ranks.begin(rank, 2, f"{folder}/store", TIMEOUTS, shape=shape)
    group = ranks.mesh.get_group("dp") if shape else None
    second = distributed.PrefixStore("second", distributed.FileStore(f"{folder}/second", 2))
    ahead = ranks.connections(distributed.PrefixStore("ahead", second), TIMEOUTS) if made_ahead else []
    if rank == 0:
        # As where gloo has forgotten a send: nothing of its own wakes the wait.
        rank_groups.wake = lambda group, ranks: None
        threading.Timer(0.3, ranks.cancel).start()
        began = time.monotonic()
        values = torch.ones(4)
        try:
            if collective == "gather":
                ranks.gather(values)
            elif collective == "all_reduce":
                distributed.all_reduce(values)
            elif collective == "of a line":
                distributed.all_reduce(values, group=group)
            else:
                distributed.reduce_scatter_single(torch.zeros(2), values)
        except RuntimeError as error:
            to.send((ranks.broke(error), time.monotonic() - began))
    ranks.connect(second, TIMEOUTS, ahead)
    values = torch.tensor([1.0 + rank])
    distributed.all_reduce(values, group=group)
    to.send(float(values))
    to.poll(60)  # until all is compared: an end closes connections


def _pair(work: Callable[..., None], *told: object) -> list[Connection]:
    """To two ranks that do it, each in a process."""
    warm()
    context = multiprocessing.get_context("forkserver")
    pipes = []
    for rank in (0, 1):
        mine, theirs = context.Pipe()
        context.Process(target=work, args=(rank, told[0], theirs, *told[1:]), daemon=True).start()
        pipes.append(mine)
    return pipes


@pytest.mark.parametrize(
    ("collective", "made_ahead"),
    [("gather", False), ("all_reduce", True), ("reduce_scatter", True), (golden("of-a-line"), True)],
)
def test_a_wait_that_nothing_wakes_ends_when_the_group_is_cancelled(
    collective: str, made_ahead: bool, tmp_path: Path
) -> None:
    """And the ranks go on over connections that were made before, or then."""
    pipes = _pair(_one, str(tmp_path), collective, made_ahead)
    assert pipes[0].poll(60)
    broke, seconds = pipes[0].recv()
    assert broke and seconds < 30, "a tenth of the group's time-out"
    for pipe in pipes:
        assert pipe.poll(60) and pipe.recv() == 3.0
    for pipe in pipes:
        pipe.send("end")


def _on_far_device(rank: int, folder: str, to: Connection) -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from tests.agent.far_device import FarFactories

    _setup_privateuseone_for_python_backend("far")  # type: ignore[no-untyped-call]
    device = torch.device("far", 0)
    with FarFactories():
        ranks = Ranks.begin(rank, 2, f"{folder}/store", TIMEOUTS, device)
        mine = torch.tensor([1.0 + rank, 3.0]).to(device)
        summed, gathered, scattered, shown = mine.clone(), *(torch.zeros(n).to(device) for n in (4, 1, 2))
        distributed.all_reduce(summed)
        distributed.all_gather_single(gathered, mine)
        distributed.reduce_scatter_single(scattered, mine)
        parts = [torch.zeros(2).to(device) for _ in range(2)]
        distributed.all_gather(parts, mine)
        shown.copy_(mine)
        distributed.broadcast(shown, 1)
        other = torch.zeros(2).to(device)
        if rank:
            distributed.send(mine, 0)
        else:
            distributed.recv(other, 1)
        found = [summed, gathered, scattered, *parts, shown, other]
        assert all(t.device == device for t in found)
        to.send(([t.tolist() for t in found], ranks.mesh.device_type))
    to.poll(60)


def test_what_is_on_another_device_goes_by_way_of_the_host(tmp_path: Path) -> None:
    pipes = _pair(_on_far_device, str(tmp_path))
    one, two = [1.0, 3.0], [2.0, 3.0]
    for rank, pipe in enumerate(pipes):
        assert pipe.poll(60)
        found, kind = pipe.recv()
        assert found == [[3.0, 6.0], one + two, [3.0, 6.0][rank : rank + 1], one, two, two, [0.0, 0.0] if rank else two]
        assert kind == "far"
    for pipe in pipes:
        pipe.send("end")
