"""Catalogs: what is planned ahead, that nothing is planned twice, and that look-ups fit."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from openrecycle.planner.catalogs import catalog as catalogs
from openrecycle.planner.catalogs import catalog_build
from openrecycle.planner.catalogs.catalog import (
    Catalog,
    CatalogInfo,
    FolderBlobs,
    MappedBlobs,
    StoredCatalog,
    create_folder,
    open_folder,
)
from openrecycle.planner.catalogs.catalog_build import (
    BuildReport,
    InlineEngine,
    LocalEngine,
    Target,
    Task,
    build_catalog,
    fill,
    make_engine,
    targets,
)
from openrecycle.planner.check import check
from openrecycle.planner.cli import app
from openrecycle.planner.jobs.errors import InfeasibleError, InputError, PlannerError
from openrecycle.planner.jobs.failures import failures_per_stage
from openrecycle.planner.jobs.job import Job, MemoryLimit, StageProfile, Technique, Worker
from openrecycle.planner.plans.packed import CatalogQuestion, Effort, pack, plan_name
from openrecycle.planner.plans.plan import PlanError
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples, refuses
from tests.golden import golden

LIST = Effort(solver="list")
SMALL = CatalogQuestion(Job.uniform(3, 2, 3), Technique.STAGGERED, MemoryLimit("uniform"))
GRID = CatalogQuestion(Job.uniform(4, 4, 6), Technique.STAGGERED, MemoryLimit("uniform"))


def build(
    question: CatalogQuestion, tolerance: int, root: Path, *, per: str = "auto", effort: Effort = LIST
) -> BuildReport:
    return build_catalog(question, tolerance, root, engine=InlineEngine(), effort=effort, per=per)


@pytest.fixture(scope="module")
def by_count(tmp_path_factory: pytest.TempPathFactory) -> StoredCatalog:
    return build(GRID, 8, tmp_path_factory.mktemp("catalogs"), per="count").catalog


def test_small_grids_have_every_pattern(tmp_path: Path) -> None:
    report = build(SMALL, 2, tmp_path)
    assert (report.planned, report.kept, report.total, report.finished) == (7, 0, 7, True)
    catalog = Catalog(SMALL.job, SMALL.technique, SMALL.memory)
    for name in report.catalog.blobs.names():
        catalog.add(report.catalog.plan(name))
    for count in range(3):
        for workers in combinations(SMALL.job.workers(), count):
            found = report.catalog.find(workers)
            assert found is not None
            assert found.plan.failed == tuple(map(str, sorted(workers)))
            fitting = report.catalog.fitting(workers)
            assert fitting is not None
            assert fitting.reason == found.reason
            assert found.plan.fingerprint == found.plan.compute_fingerprint()
            assert check(found.plan) == []
            in_memory = catalog.find(workers)
            assert in_memory is not None
            assert found.plan == in_memory
    assert report.catalog.find([Worker(0, 0), Worker(1, 0), Worker(2, 1)]) is None
    assert report.catalog.fitting([Worker(0, 0), Worker(1, 0), Worker(2, 1)]) is None


def test_a_plan_is_stored_as_it_was_made(tmp_path: Path) -> None:
    catalog = build(SMALL, 1, tmp_path).catalog
    for failed in (frozenset[Worker](), frozenset({Worker(0, 1)})):
        stored = catalog.plan(plan_name(failed))
        made = make_plan(SMALL.problem(failed), solver="list", look_ahead=False)
        assert stored.model_copy(update={"solver": made.solver}) == made


def test_what_is_there_is_not_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(SMALL, 1, tmp_path)
    folder = first.catalog.blobs
    assert isinstance(folder, FolderBlobs)
    names = folder.names()
    (folder.path / f"{names[0]}.plan").write_bytes(b"half")
    parts = [folder.path / f"{names[1]}.plan.{number}.part" for number in (77, 78)]
    for part in parts:
        part.write_bytes(b"a killed run left this, or another is writing it")
    os.utime(parts[0], (0, 0))
    again = build(SMALL, 1, tmp_path)
    assert (again.planned, again.kept) == (1, 2)
    assert [part.exists() for part in parts] == [False, True]
    (folder.path / "gone.part").symlink_to("nothing")  # listed, and then not there: another process has completed it
    assert build(SMALL, 1, tmp_path).planned == 0
    assert catalogs.open_folder(folder.path).header(names[0]).failures == 0
    more = build(SMALL, 2, tmp_path)
    assert (more.planned, more.kept, more.total) == (4, 3, 7)
    other = CatalogQuestion(SMALL.job, SMALL.technique, MemoryLimit("none"))
    assert build(other, 1, tmp_path).kept == 0
    monkeypatch.setattr(catalogs, "PLANNER_VERSION", "another")
    assert build(SMALL, 1, tmp_path).kept == 0
    assert len(list(tmp_path.iterdir())) == 3


class _Overtaken(FolderBlobs):
    """When it is first asked for a plan, another command tries to put its own."""

    def __init__(self, path: Path, other: threading.Thread) -> None:
        super().__init__(path)
        self._other = other

    def get(self, name: str) -> bytes | None:
        found = super().get(name)
        if not self._other.ident:
            self._other.start()
            self._other.join(0.5)  # to its end, or until it waits for this one
        return found


class _Made:
    """An engine that yields one plan."""

    def __init__(self, name: str, blob: bytes) -> None:
        self._blobs = [(name, blob)]

    def run(self, tasks: Iterator[Task], cancelled: object) -> Iterator[list[tuple[str, bytes]]]:
        yield self._blobs


def test_of_the_plans_of_two_commands_at_once_the_better_is_kept(tmp_path: Path) -> None:
    _, folder = create_folder(tmp_path, SMALL)
    plan = make_plan(SMALL.problem(frozenset()), solver="list")
    name, longer = plan_name([]), {"period": plan.metrics.period + 1}
    worse = plan.model_copy(update={"metrics": plan.metrics.model_copy(update=longer)})
    engines = [_Made(name, pack(one, LIST)) for one in (plan, worse)]
    wanted = [Target(0, (((),) * SMALL.job.stages,))]

    def better() -> None:
        fill(SMALL, wanted, folder, engine=engines[0], effort=LIST)

    other = threading.Thread(target=better)
    fill(SMALL, wanted, _Overtaken(folder.path, other), engine=engines[1], effort=LIST)
    other.join()
    assert StoredCatalog(CatalogInfo.of(SMALL), folder).header(name).metrics.period == plan.metrics.period


def test_more_effort_plans_again_what_is_not_proven(tmp_path: Path) -> None:
    job = Job.uniform(3, 4, 6, durations={"F": 1, "I": 1.1, "W": 0.9})
    question = CatalogQuestion(job, Technique.STAGGERED, MemoryLimit("uniform"))
    listed = build(question, 1, tmp_path).catalog
    open_ones = [n for n in listed.blobs.names() if listed.header(n).solver.status != "optimal"]
    assert open_ones
    tuned = build(question, 1, tmp_path, effort=Effort(solver="auto", time_limit=0.05))
    assert tuned.planned == len(open_ones)
    assert build(question, 1, tmp_path).planned == 0  # the list scheduler does not undo it


def test_a_plan_that_comes_out_worse_replaces_none(tmp_path: Path) -> None:
    """What an hour of another solver has found is not lost to a try of seconds; nor is that made again and again."""
    before = build(SMALL, 1, tmp_path).catalog
    plan = next(p for name in before.blobs.names() if (p := before.plan(name)).failed)
    worse = plan.model_copy(update={"metrics": plan.metrics.model_copy(update={"period": plan.metrics.period + 1})})
    name, effort = plan_name(plan.problem().failed), Effort(solver="auto", time_limit=1)

    class Worse(InlineEngine):
        def run(self, tasks: object, cancelled: object = None) -> Iterator[list[tuple[str, bytes]]]:
            yield [(name, pack(worse, effort))]

    folder = before.blobs
    assert isinstance(folder, FolderBlobs)
    fill(SMALL, targets(SMALL, 1), folder, engine=Worse(), effort=effort)
    after = open_folder(folder.path)
    assert after.plan(name) == plan and after.header(name).effort == effort


def test_what_is_no_plan_is_passed_over(tmp_path: Path) -> None:
    """A damaged plan of more failures than are asked for, and a file of somebody's own."""
    folder = build(SMALL, 2, tmp_path).catalog.blobs
    assert isinstance(folder, FolderBlobs)
    last = folder.names()[-1]
    (folder.path / f"{last}.plan").write_bytes(b"half")
    (folder.path / "notes.plan").write_text("mine")
    again = build(SMALL, 1, tmp_path)
    assert (again.planned, again.kept) == (0, 3)
    sizes = ["--pipelines", "3", "--stages", "2", "--micro-batches", "3", "--solver", "list", "--tolerance", "1"]
    found = CliRunner().invoke(app, ["catalog", *sizes, "--out", str(tmp_path), "--json"], catch_exceptions=False)
    assert found.exit_code == 0 and json.loads(found.stdout)["plans"] == 6


def test_a_damaged_plan_hides_no_other(tmp_path: Path) -> None:
    """Of as many failures on each stage, in one pipeline and in two: either plan serves both."""
    folder = build(SMALL, 2, tmp_path).catalog.blobs
    assert isinstance(folder, FolderBlobs)
    failed = frozenset({Worker(0, 0), Worker(0, 1)})
    (folder.path / f"{plan_name(failed)}.plan").write_bytes(b"half")
    for lost in (failed, frozenset({Worker(0, 0), Worker(1, 1)})):
        found = open_folder(folder.path).find(lost)
        assert found is not None and found.plan.failed == tuple(map(str, sorted(lost)))


def test_by_count_no_plan_is_beaten_by_its_neighbour(by_count: StoredCatalog) -> None:
    headers = [by_count.header(name) for name in by_count.blobs.names()]
    assert [h.failures for h in headers] == list(range(9))
    periods = [h.metrics.period for h in headers]
    assert periods == sorted(periods)
    for name in by_count.blobs.names():
        plan = by_count.plan(name)
        assert check(plan) == []
        fresh = make_plan(plan.problem(), solver="list", look_ahead=False)
        assert plan.metrics.lower_bound == fresh.metrics.lower_bound
        assert plan.metrics.period <= fresh.metrics.period
        schedule = plan.schedule()
        assert plan.metrics.period == GRID.job.units(schedule.period)
        assert plan.metrics.bubble_fraction == schedule.bubble_fraction
        assert plan.metrics.gap == plan.metrics.period / plan.metrics.lower_bound - 1
        assert plan.metrics.slowdown_vs_1f1b == plan.metrics.period / 27 - 1
        assert plan.metrics.peak_activations == {str(w): n for w, n in schedule.peak_activations.items()}


def test_no_plan_gives_way_to_one_that_is_longer_among_more_peers(tmp_path: Path) -> None:
    """What the neighbour's plan takes with a failure less counts: the reduction is among more peers then."""
    profile = StageProfile(1, 1, 1, reductions=tuple(6.0 * n for n in range(6)))
    question = CatalogQuestion(Job(6, 1, 2, profiles=(profile,)), Technique.STAGGERED, MemoryLimit("uniform"))
    for header in build(question, 5, tmp_path, per="count").catalog.headers().values():
        fresh = make_plan(question.problem(header.workers), solver="list", look_ahead=False)
        assert header.metrics.period <= fresh.metrics.period


def test_quick_tries_on_large_grids_are_no_worse_than_one_distribution(
    by_count: StoredCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_build, "LARGE", 0)
    large = build(GRID, 8, tmp_path, per="count").catalog
    periods = []
    for name in large.blobs.names():
        plan = large.plan(name)
        assert check(plan) == []
        assert plan.metrics.period == GRID.job.units(plan.schedule().period)
        periods.append(plan.metrics.period)
    assert periods == sorted(periods)
    careful = [by_count.header(name).metrics.period for name in by_count.blobs.names()]
    assert max(quick / slow for quick, slow in zip(periods, careful, strict=True)) < 1.1


@examples(60)
@given(st.data())
def test_failures_find_the_plan_for_as_many_on_each_stage(by_count: StoredCatalog, data: st.DataObject) -> None:
    job = GRID.job
    header = by_count.header(data.draw(st.sampled_from(by_count.blobs.names())))
    dead = {s: data.draw(st.permutations(range(job.pipelines)))[:n] for s, n in enumerate(header.counts)}
    failed = frozenset(Worker(p, s) for s, pipelines in dead.items() for p in pipelines)
    found, fitting = by_count.find(failed), by_count.fitting(failed)
    assert found is not None and fitting is not None
    assert check(found.plan) == []
    assert set(found.plan.failed) == set(map(str, failed))
    assert found.plan.fingerprint == found.plan.compute_fingerprint()
    assert found.plan.metrics.period == header.metrics.period
    alone = StoredCatalog(by_count.info, MappedBlobs({fitting.name: by_count.blobs.get(fitting.name) or b""}))
    assert alone.find(failed) == found and found.reason == fitting.reason
    if other := next((w for w in job.workers() if w not in failed), None):
        stored = [by_count.header(name).counts for name in by_count.blobs.names()]
        more = failed | {other}
        assert (by_count.find(more) is not None) == (failures_per_stage(more, job) in stored)


def test_a_large_grid_gets_one_plan_per_count() -> None:
    large = CatalogQuestion(Job.uniform(64, 32, 64), Technique.STAGGERED, MemoryLimit("uniform"))
    wanted = targets(large, 512)
    assert [t.failures for t in wanted] == list(range(513))
    for target in wanted:
        assert all(sum(map(len, rows)) == target.failures for rows in target.alternatives)
    assert len(targets(SMALL, 2)) == 7
    assert len(targets(SMALL, 2, "count")) == 3


@pytest.mark.processes
def test_processes_make_the_same_plans(tmp_path: Path) -> None:
    here = build(SMALL, 2, tmp_path / "a").catalog
    there = build_catalog(SMALL, 2, tmp_path / "b", engine=make_engine(2), effort=LIST)
    assert there.finished
    for name in here.blobs.names():
        ours, theirs = here.plan(name), there.catalog.plan(name)
        assert ours.fingerprint == theirs.fingerprint
        assert ours.metrics == theirs.metrics


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    """Before, and in the middle; and nothing half written stays."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="--out"):
        build(SMALL, 1, tmp_path / "file")
    with pytest.raises(InputError, match="--out"):
        FolderBlobs(tmp_path / "gone").put("name", b"plan")
    (tmp_path / "name.plan").mkdir()
    with pytest.raises(InputError, match="--out"):
        FolderBlobs(tmp_path).put("name", b"plan")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "name.plan"]


@pytest.mark.processes
def test_processes_that_die_between_two_tasks_are_told_of() -> None:
    """The next task can't be handed to them."""
    targets = [Target(0, (((),) * SMALL.job.stages,))] * 12
    tasks = (Task(SMALL, Effort(solver="list"), (target,), False) for target in targets)
    before = set(threading.enumerate())
    made = LocalEngine(2).run(tasks, None)
    next(made)
    for child in multiprocessing.active_children():
        child.kill()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)  # until the pool has seen it
    with pytest.raises(PlannerError, match=golden("a-planning-process-died")):
        list(made)


@pytest.mark.parametrize("error", [InputError("--solver", "milp", "list"), InfeasibleError("no peer", "a migration")])
def test_an_error_of_a_planning_process_arrives_whole(error: PlannerError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_cancelled_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_build, "CHUNK", 2)
    seen: list[tuple[int, int]] = []
    report = build_catalog(
        SMALL,
        2,
        tmp_path,
        engine=InlineEngine(),
        effort=LIST,
        on_progress=lambda done, total: seen.append((done, total)),
        cancelled=lambda: len(seen) > 2,
    )
    assert not report.finished
    assert seen == [(0, 7), (2, 7), (4, 7)]
    assert len(report.catalog) == report.planned == 4
    again = build(SMALL, 2, tmp_path)
    assert (again.kept, again.planned, again.finished) == (4, 3, True)


def test_bad_input(tmp_path: Path) -> None:
    with refuses("--tolerance", 5):
        build(SMALL, 5, tmp_path)
    with pytest.raises(InputError, match="--tolerance: got -1"):
        build(SMALL, -1, tmp_path)
    with pytest.raises(InputError, match="--per: got 'week'"):
        build(SMALL, 1, tmp_path, per="week")
    fault_free = CatalogQuestion(SMALL.job, Technique.FAULT_FREE, MemoryLimit("1f1b"))
    with refuses("--tolerance", 1):
        build(fault_free, 1, tmp_path)
    with pytest.raises(InputError, match="--jobs: got 0"):
        make_engine(0)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--out"):
        create_folder(tmp_path / "file", SMALL)
    with pytest.raises(PlanError, match=golden("catalog-json-cant-be-read")):
        open_folder(tmp_path)
    with pytest.raises(PlanError, match="job: Field required"):
        CatalogInfo.from_json("{}")
    with pytest.raises(InputError, match="W3_0"):
        build(SMALL, 0, tmp_path).catalog.find([Worker(3, 0)])


ARGS = ["catalog", "--pipelines", "3", "--stages", "2", "--micro-batches", "3", "--tolerance", "2", "--jobs", "1"]


def test_the_command(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*ARGS, "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert (document["plans"], document["planned"], document["kept"], document["finished"]) == (7, 7, 0, True)
    assert Path(document["folder"]).is_dir()
    assert document["bytes"] == sum(p.stat().st_size for p in Path(document["folder"]).glob("*.plan"))
    done = CliRunner().invoke(app, [*ARGS, "--out", str(tmp_path)])
    assert "0 planned now" in done.output
    assert "7 were there" in done.output
    fault_free = [*ARGS, "--out", str(tmp_path), "--technique", "fault-free", "--memory", "1f1b", "--tolerance", "0"]
    done = CliRunner().invoke(app, [*fault_free, "--json"])
    assert json.loads(done.output)["plans"] == 1
    done = CliRunner().invoke(app, [*ARGS, "--out", str(tmp_path), "--solver", "oracle"])
    assert isinstance(done.exception, PlannerError)
    assert "--solver: got 'oracle'" in str(done.exception)


# 21 plans, one per task, of about a second each.
SLOW = ["--pipelines", "6", "--stages", "4", "--micro-batches", "8", "--tolerance", "20", "--per", "count"]
SLOW += ["--solver", "auto", "--time-limit", "1", "--jobs", "2"]


@pytest.mark.processes
def test_ctrl_c_keeps_what_is_done_and_leaves_no_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "planner", "catalog", *SLOW, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("*/*.plan")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the children get it too
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "stopping" in err
    assert golden("the-same-command-goes-on") in out
    assert _group_ends(process.pid)
    (folder,) = tmp_path.iterdir()
    catalog = open_folder(folder)
    assert 0 < len(catalog) < 21
    for name in catalog.blobs.names():
        catalog.header(name)


@pytest.mark.processes
def test_a_killed_build_takes_its_processes_along_and_leaves_no_damaged_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "planner", "catalog", *SLOW, "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("*/*.plan")) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert _group_ends(process.pid)
    (folder,) = tmp_path.iterdir()
    catalog = open_folder(folder)
    assert len(catalog) > 0
    for name in catalog.blobs.names():
        assert check(catalog.plan(name)) == []


def _group_ends(group: int) -> bool:
    """Is every process of the group gone within half a minute?"""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
