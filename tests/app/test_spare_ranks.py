"""Workers of several ranks, as the console has them: each rank's process, and what is left of a hurt worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from openrecycle.agent.coordination.blame import Links
from openrecycle.agent.messages.protocol import Acknowledgement, FailureReport, JobSpec, Registration
from openrecycle.app.charts.progress import SPARE, worker_grid, worker_sentence
from openrecycle.app.charts.theme import LIGHT
from openrecycle.app.console.view import JobView, WorkerDetail
from openrecycle.app.jobs.states import RankState
from openrecycle.app.ui import facts
from openrecycle.app.ui.worker_dialog import facts_html, ranks_html
from tests.app.played_launcher import PlayedJob

pytestmark = pytest.mark.processes

NAMES = [f"W{p}_{s}" for p in range(3) for s in range(2)]
SPEC = JobSpec(name="a job", pipelines=3, stages=2, micro_batches=2, iterations=100, ranks_per_worker=2)


class Job(PlayedJob):
    def __init__(self, path: Path, job_id: str | None = None) -> None:
        super().__init__(path, SPEC, job_id)

    def begin(self) -> None:
        for number, name in enumerate(NAMES):
            self.register(name, f"{name}-a", 100 + 10 * number)
        self.take_up(1, {name: f"{name}-a" for name in NAMES})

    def register(self, name: str, incarnation: str, pid: int, made_of: tuple[tuple[str, int], ...] = ()) -> None:
        ranks = (pid, pid + 1)
        message = Registration(
            worker=name, incarnation=incarnation, host="node-a", pid=pid, ranks=ranks, made_of=made_of
        )
        self.console.reports.register(self.id, [message])

    def take_up(self, generation: int, living: dict[str, str]) -> None:
        for state in ("adopted", "formed", "resumed"):
            for name, incarnation in living.items():
                said = Acknowledgement(worker=name, incarnation=incarnation, generation=generation, state=state)  # type: ignore[arg-type]
                self.console.reports.acknowledge(self.id, [said])

    def hurt(self, name: str, rank: int) -> None:
        """One rank is gone, so the other ends."""
        detail = f"was killed by SIGKILL (its rank {rank})"
        report = FailureReport(
            worker=name, incarnation=f"{name}-a", cause="exit", reporter="launcher", detail=detail, spare=(1 - rank,)
        )
        self.console.reports.failures(self.id, [report])
        members = self.console.jobs.find(self.id).state.members.values()
        living = {m.name: m.incarnation for m in members if m.state == "running" and m.incarnation}
        self.take_up(self.console.jobs.find(self.id).state.generation, living)

    @property
    def view(self) -> JobView:
        return self.console.queries.view(self.id)

    def dialog(self, name: str) -> WorkerDetail:
        return self.console.queries.worker_detail(self.view, name, time.time())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "console.db")
    job.begin()
    yield job
    job.close()


def states(detail: WorkerDetail) -> list[tuple[int, str, RankState]]:
    return [(rank.pid, rank.host, rank.state) for rank in detail.ranks]


def test_a_dialog_has_the_process_of_each_rank(job: Job) -> None:
    assert states(job.dialog("W1_1")) == [(130, "node-a", RankState.RUNNING), (131, "node-a", RankState.RUNNING)]
    html = ranks_html(job.dialog("W1_1"))
    assert "130" in html and "131" in html and "spare" not in html


def test_what_is_left_of_a_hurt_worker_is_spare(job: Job) -> None:
    job.hurt("W1_1", 1)
    detail, view = job.dialog("W1_1"), job.view
    assert states(detail) == [(130, "node-a", RankState.SPARE), (131, "node-a", RankState.DEAD)]
    assert "spare" in ranks_html(detail) and "spare" in facts_html(detail)
    assert [(rank.pid, rank.host) for rank in view.spares] == [(130, "node-a")]
    (hurt,) = (worker for worker in view.workers if worker.name == "W1_1")
    assert hurt.spare == 1 and "spare" in facts.tile_words(hurt) and "spare" in worker_sentence(hurt)
    assert "spare" in view.sentence and "node-a" in view.sentence
    spare = dict(zip(NAMES, worker_grid(view, LIGHT).rows[SPARE], strict=True))
    assert spare == {name: int(name == "W1_1") for name in NAMES}


def test_spares_that_have_become_a_worker_are_spare_no_more(job: Job) -> None:
    job.hurt("W1_1", 1)
    job.hurt("W2_0", 0)
    assert len(job.view.spares) == 2
    job.register("W1_1", "W1_1-b", 900, made_of=(("W1_1-a", 0), ("W2_0-a", 1)))
    assert job.view.spares == () and "spare" not in job.view.sentence
    assert states(job.dialog("W1_1")) == [(900, "node-a", RankState.RUNNING), (901, "node-a", RankState.RUNNING)]
    assert job.dialog("W1_1").made_of == ("W1_1", "W2_0")
    gone = job.dialog("W2_0")
    assert [rank.state for rank in gone.ranks] == [RankState.DEAD, RankState.USED] and gone.ranks[1].used_by == "W1_1"
    assert "W1_1" in ranks_html(gone)


def test_they_may_take_the_place_of_one_that_is_out_for_good(job: Job) -> None:
    """They ran elsewhere: their links have not broken."""
    job.hurt("W1_1", 1)
    job.hurt("W2_0", 0)
    live = job.console.jobs.find(job.id)
    live.state = replace(live.state, links=Links(barred=("W1_1",)))
    job.register("W1_1", "one-spare", 800, made_of=(("W1_1-a", 0),))
    assert live.state.members["W1_1"].incarnation == "W1_1-a", "of its other rank nobody knows where it runs"
    job.register("W1_1", "two-spare", 900, made_of=(("W1_1-a", 0), ("W2_0-a", 1)))
    assert live.state.members["W1_1"].incarnation == "two-spare" and not live.state.links.barred


def test_the_console_remembers_them(job: Job, tmp_path: Path) -> None:
    job.hurt("W1_1", 1)
    before = states(job.dialog("W1_1"))
    again = Job(tmp_path / "console.db", job.id)
    try:
        assert states(again.dialog("W1_1")) == before and len(again.view.spares) == 1
    finally:
        again.close()
