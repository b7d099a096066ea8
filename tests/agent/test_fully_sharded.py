"""Workers of several ranks whose layers are fully sharded: each rank has a part of every parameter and of every
micro-batch."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openrecycle.agent.models.divided import DividedBatches
from openrecycle.agent.models.parallelized import is_divided
from openrecycle.planner.jobs.errors import InputError
from tests.agent import rank_stages
from tests.agent.launches import warm
from tests.agent.rank_stages import KEYS, KINDS, Residual, Task, train
from tests.agent.runs import Run, forked
from tests.conftest import at_length

ITERATIONS = 6


class Together:
    """The ranks of one worker, each in a process of its own."""

    def __init__(self, ranks: int, folder: Path) -> None:
        warm()
        context = multiprocessing.get_context("forkserver")
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_stages.as_rank, args=(rank, ranks, str(folder / "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, *what: Any) -> list[dict[str, Tensor]]:
        """What each rank answers."""
        for pipe in self._pipes:
            pipe.send(what)
        return [{k: torch.as_tensor(v) for k, v in pipe.recv().items()} for pipe in self._pipes]

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


@pytest.fixture(scope="module", params=[2, 3])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    ranks = Together(request.param, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.end()


@pytest.mark.processes
@pytest.mark.parametrize("split", ["deferred", "torch", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_make_of_a_micro_batch_what_one_process_makes(
    kind: type[nn.Module], split: Any, together: Together
) -> None:
    """The gradients, the loss, changes of buffers, and what goes back to the stage before."""
    alone = train(Task(kind), split, lambda _, gradient: gradient, turned=False)
    answers = together.ask(kind, False, split, False)
    for name, expected in alone.items():
        if name in ("bits", "held"):
            continue
        if name.startswith("of the input"):
            got = torch.cat([answer[name] for answer in answers])
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
            continue
        for answer in answers:
            torch.testing.assert_close(answer[name], expected, rtol=1e-4, atol=1e-6)
    assert {n for n in alone} == {n for n in answers[0]}
    assert all(answer["held"] == 0 for answer in answers), "between two ops nobody holds whole parameters"


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Residual, rank_stages.Counting])
def test_the_order_of_micro_batches_shows_in_no_bit(kind: type[nn.Module], together: Together) -> None:
    once, turned = (together.ask(kind, True, "deferred", turned) for turned in (False, True))
    for a, b in zip(once, turned, strict=True):
        assert torch.equal(a["bits"], b["bits"])


@pytest.mark.processes
def test_layers_may_be_left_whole(together: Together) -> None:
    alone = train(Task(Residual), "deferred", lambda _, gradient: gradient, turned=False)
    for answer in together.ask(Residual, True, "deferred", False):
        for name in alone:
            if name not in ("bits", "held") and not name.startswith("of the input"):
                torch.testing.assert_close(answer[name], alone[name], rtol=1e-4, atol=1e-6)
