"""Every file that the console gives out is opened and checked; what it refuses, it refuses with a reason."""

from __future__ import annotations

import csv
import io
import json
import shlex
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from PIL import Image
from starlette.applications import Starlette
from starlette.testclient import TestClient
from typer.main import get_command
from typer.testing import CliRunner
from ui_console import ConsoleHere, JobHere
from ui_factory import plan as made_plan

from openrecycle.agent.cli import app as agent_cli
from openrecycle.agent.config.options import TOLD
from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.plans import files
from openrecycle.app.plans.files import (
    CatalogPart,
    Export,
    catalog_line,
    document,
    file_stem,
    launch_line,
    make_bundle,
    offer_named,
    offers,
    plan_line,
    render,
)
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.server import create_routes
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.check import check
from openrecycle.planner.cli import app as planner_cli
from openrecycle.planner.jobs.job import Job, LayerProfile, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.plans.packed import pack, unpack
from openrecycle.planner.plans.plan import JobDoc, Plan, PlannedOps, job_doc
from openrecycle.planner.plans.schedule import OpsByWorker
from openrecycle.planner.solvers.portfolio import make_plan
from tests.golden import golden

pytestmark = pytest.mark.processes


def opened(name: str, content: bytes, plan: Plan) -> None:
    """Reads the file with somebody else's reader where there is one, and counts its ops."""
    ops = plan.op_count
    if name == "chrome-trace":
        events = json.loads(content)["traceEvents"]
        assert sum(e["ph"] == "X" for e in events) == ops
    elif name == "torch-csv":
        cells = [[c for c in row if c] for row in csv.reader(io.StringIO(content.decode()))]
        compute = sum(op.kind != "O" for s in range(plan.job.stages) for op in plan.workers[f"W0_{s}"])
        assert len(cells) == plan.job.stages and sum(map(len, cells)) == compute
    elif name == "csv":
        rows = list(csv.DictReader(io.StringIO(content.decode())))
        assert len(rows) == ops and {r["worker"] for r in rows} == set(plan.workers)
    elif name == "json":
        assert Plan.from_json(content) == plan
    elif name == "yaml":
        assert Plan.from_document(yaml.safe_load(content)) == plan
    elif name == "svg":
        assert ElementTree.fromstring(content.decode()).tag.endswith("svg")
    elif name == "png":
        picture = Image.open(io.BytesIO(content))
        picture.load()
        assert picture.width > 900
    else:
        assert name == "bundle"
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None
            assert Plan.from_json(archive.read("plan.json")) == plan
            assert JobDoc.model_validate_json(archive.read("profile.json")) == plan.job


@pytest.mark.parametrize("failed", [(), ("W1_2",)], ids=["fault-free", "failed"])
def test_each_format_opens(failed: tuple[str, ...]) -> None:
    plan = made_plan(failed)
    names = set()
    for offer in offers(plan, "demo: in force"):
        names.add(offer.file_name)
        if offer.refusal is None:
            opened(offer.name, render(Export(plan, "demo"), offer), plan)
        else:
            assert failed and offer.name == "torch-csv"
            assert "one rank" in offer.refusal.detail
            with pytest.raises(ConsoleError, match="re-routes") as refused:
                render(Export(plan, "demo"), offer)
            assert refused.value.status == 422
    assert len(names) == 8, "no file overwrites another"
    assert all(name.startswith(file_stem(plan, "demo")) for name in names)


def test_names_say_what_the_file_is() -> None:
    plan = made_plan(("W1_2",))
    said = f"3x4x6-without-W1_2-staggered-{plan.fingerprint[:8]}"
    assert file_stem(plan, "my job/../x: in force", at=1_790_000_000) == f"my-job-..-x-{said}-2026-09-21"
    assert file_stem(plan, "…").startswith("plan-3x4x6-")


def test_the_same_plan_of_two_jobs_of_one_name_and_on_two_days_makes_files_of_their_own() -> None:
    plan, day = made_plan(("W1_2",)), 86_400.0
    stems = {file_stem(plan, "demo", job, at) for job in (None, "a1b2c3d4e5", "f6a7b8c9d0") for at in (day, 2 * day)}
    assert len(stems) == 6
    for name in ("without W1_2", "Adaptive pipelining, without W1_2, memory uniform", "demo in force: without W1_2"):
        assert file_stem(plan, name).count("W1_2") == 1, "what the rest says too is not repeated"


def test_a_large_plan_is_exported_by_a_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes; and what the child refuses arrives as the same sentence."""
    plan = made_plan(("W1_2",))
    here = {o.name: render(Export(plan, "demo"), o) for o in offers(plan, "demo") if o.name in ("csv", "bundle")}
    monkeypatch.setattr(files, "OPS_HERE", 0)
    for name, content in here.items():
        assert render(Export(plan, "demo"), offer_named(plan, "demo", name)) == content
    assert document(plan) == plan.to_json().encode()
    with pytest.raises(ConsoleError, match="pipeline: got 9"):
        render(Export(plan, "demo"), offer_named(plan, "demo", "svg"), pipeline=9)


@pytest.mark.parametrize("failed", [(), ("W1_0",)], ids=["fault-free", "failed"])
def test_what_is_offered_of_a_plan_is_known_without_making_its_ops(
    failed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(Problem(Job.uniform(2, 2, 3), frozenset(map(Worker.parse, failed))), solver="list")
    offered, packed = list(offers(plan, "x")), unpack(pack(plan))

    def made(ops: object, worker: object) -> None:
        raise AssertionError("an op is made, 400,000 of 2,048 workers")

    monkeypatch.setattr(OpsByWorker, "__getitem__", made)
    monkeypatch.setattr(PlannedOps, "__getitem__", made)
    with pytest.raises(AssertionError):
        len(packed.workers["W0_0"])
    assert list(map(repr, offers(packed, "x"))) == list(map(repr, offered))


def test_too_large_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made_plan()
    monkeypatch.setattr(files, "MAX_OPS", 100)
    for offer in offers(plan, "demo"):
        with pytest.raises(ConsoleError, match="at most 100") as refused:
            render(Export(plan, "demo"), offer)
        assert (refused.value.status, refused.value.code) == (413, "too_large")


def test_the_bundle_holds_the_catalog_and_lines_that_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(2, 2, 3, (StageProfile(2.5, 2, 1, 1), StageProfile(3, 3, 2, 1)), (0.5,), time_unit="ms")
    plan = make_plan_for(job)
    catalog = Catalog(job, plan.problem().technique, plan.problem().memory)
    for failed in (frozenset[Worker](), frozenset({Worker(1, 0)}), frozenset({Worker(1, 1)})):
        catalog.add(make_plan(catalog.problem(failed), solver="list"))
    content = render(Export(plan, "uneven", catalog=lambda: catalog), offer_named(plan, "uneven", "bundle"))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(tmp_path)
        alone = {name for name in archive.namelist() if not name.startswith("catalog/")}
        assert alone == {"README.md", "plan.json", "plan.svg", "profile.json"}
        assert not check(Plan.from_json(archive.read("plan.json")))
        readme = archive.read("README.md").decode()
    lines = [line for line in readme.splitlines() if line.startswith("openrecycle ")]
    assert [shlex.split(line)[1] for line in lines] == ["check", "plan", "catalog", "train"]
    for line in lines:
        _, command, *options = shlex.split(line)
        group = get_command(agent_cli if command == "train" else planner_cli)
        group.commands[command].make_context(command, list(options))  # type: ignore[attr-defined]
    assert "--profile profile.json" in lines[-1]
    monkeypatch.chdir(tmp_path)
    again = CliRunner().invoke(planner_cli, [*shlex.split(lines[2])[1:], "--json"])
    made = json.loads(again.stdout)
    assert (again.exit_code, made["kept"], made["planned"]) == (0, 3, 0), "it goes on from all of the bundle's"


def test_what_is_made_anew_has_the_plans_failures_and_layers() -> None:
    assert "--tolerance 2 " in catalog_line(make_plan_for(Job.uniform(3, 2, 2)), 2)
    assert "--tolerance 1 " in catalog_line(made_plan(("W1_2",)), 0)
    assert "--tolerance 1 " in catalog_line(made_plan(), 0), "plans ahead are for failures"
    assert catalog_line(make_plan_for(Job.uniform(1, 2, 2)), 0) == "", "of these there are none"
    job = Job.uniform(2, 2, 2, layers=4)
    assert "--partition" not in plan_line(make_plan_for(job))
    assert plan_line(make_plan_for(job.with_partition((3, 1)))).endswith("--partition 3,1")


def test_the_line_makes_the_same_plan_of_layers_that_have_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = make_plan_for(Job.uniform(2, 2, 2, layers=4).with_partition((3, 1)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.json").write_text(moved.job.model_dump_json())
    again = CliRunner().invoke(planner_cli, [*shlex.split(plan_line(moved))[1:], "--solver", "list", "--json"])
    assert again.exit_code == 0, again.output
    made = Plan.from_json(again.stdout)
    assert (made.job.partition, made.partition) == ((2, 2), (3, 1)) and made.fingerprint == moved.fingerprint


@pytest.mark.parametrize(
    ("changes", "memory"),
    [
        ({"profiles": (StageProfile(reductions=(1, 3)),) * 2}, "none"),
        ({"backward_transfers": (2.0,)}, "none"),
        ({"profiles": (StageProfile(activation_bytes=5),) * 2, "capacity_bytes": (10, 10)}, "bytes"),
        ({"layers": (LayerProfile(),) * 2}, "none"),
    ],
)
def test_what_is_no_job_in_slots_is_started_by_its_profile(changes: dict[str, Any], memory: str) -> None:
    plan = make_plan_for(Job(2, 2, 2, **changes), memory)
    assert "--profile profile.json" in launch_line(plan, None)
    assert "--profile" not in launch_line(make_plan_for(Job(2, 2, 2)), None)


def make_plan_for(job: Job, memory: str = "none") -> Plan:
    return make_plan(Problem(job, technique=Technique.STAGGERED, memory=MemoryLimit(memory)), solver="list")


def test_the_launch_line_is_that_of_the_job(here: ConsoleHere) -> None:
    job = JobHere(here.console, "paced job", iterations=70)
    line = launch_line(made_plan(), job.spec)
    assert "--pace F=40ms,I=40ms,W=40ms" in line and "--iterations 70" in line and "--demo" in line
    assert "--name 'paced job'" in line and "--profile" not in line
    by_profile = job.spec.model_copy(update={"durations": {}, "profile": made_plan().job})
    line = launch_line(made_plan(), by_profile)
    assert "--profile profile.json" in line and "--pace profile" in line
    slots = launch_line(made_plan(unit="slot"), None)
    assert "--pace" not in slots and "--profile" not in slots
    readme = zipfile.ZipFile(io.BytesIO(make_bundle(made_plan(("W1_2",)), "x", None, CatalogPart({}, "none"))))
    assert golden("comes-into-force-when-w1") in readme.read("README.md").decode()
    assert job_doc(job.spec.job()) == made_plan().job


def test_the_launch_line_gives_all_that_a_console_is_told_of_the_options() -> None:
    job = Job.uniform(2, 2, 4, durations={"F": 4.0, "I": 4.0, "W": 4.0}, time_unit="ms", layers=5)
    told: dict[str, Any] = {
        "name": "all of it",
        "iterations": 70,
        "technique": "decoupled",
        "memory": "none",
        "paced": True,
        "demo": True,
        "checkpoints": True,
        "migrate": False,
        "relayout": "always",
        "seed": 7,
        "transfer_timeout": 240.0,
        "group_timeout": 300.0,
        "max_restarts": 3,
        "ranks_per_worker": 2,
    }
    assert told.keys() == TOLD.keys()
    line = launch_line(make_plan_for(job), JobSpec.of(job, **told))
    read = get_command(agent_cli).commands["train"].make_context("train", shlex.split(line)[2:])  # type: ignore[attr-defined]
    given = {name: value for name, value in read.params.items() if read.get_parameter_source(name).name != "DEFAULT"}
    expected = {TOLD[field].replace(".", "_"): value for field, value in told.items() if field != "checkpoints"}
    grid = {"pipelines": 2, "stages": 2, "micro_batches": 4}
    assert given == expected | grid | {"planning_pace": "profile", "profile": Path("profile.json")}
    usual = JobSpec.of(job, name="job", iterations=30, relayout="auto", migrate=True, transfer_timeout=120.0)
    short = launch_line(make_plan_for(job), usual)
    assert not any(flag in short for flag in ("--relayout", "--migrate", "-timeout", "-restarts", "--ranks", "--demo"))


def test_over_the_api(here: ConsoleHere) -> None:
    job = JobHere(here.console, "api job").register().die("W1_2").heal("W1_2", 2)
    client = TestClient(Starlette(routes=create_routes(here.console)))
    plan = here.console.queries.view(job.job_id).plan
    assert plan is not None
    kept = made_plan(technique="decoupled", memory="none")
    saved = here.console.plans.library.save(kept, "kept")
    for path, shown in (
        (f"/api/v1/jobs/{job.job_id}/plans/{plan.fingerprint}/export", plan),
        (f"/api/v1/jobs/{job.job_id}/plans/in-force/export", plan),
        (f"/api/v1/plans/{saved}/export", kept),
    ):
        for offer in offers(shown, "x"):
            answer = client.get(path, params={"format": offer.name})
            if offer.refusal is None:
                assert answer.status_code == 200 and answer.headers["content-type"].startswith(offer.media_type)
                assert answer.headers["content-disposition"].startswith('attachment; filename="')
                opened(offer.name, answer.content, shown)
            else:
                assert (answer.status_code, answer.json()["code"]) == (422, "not_in_this_format")
    bundle = client.get(f"/api/v1/jobs/{job.job_id}/plans/in-force/export", params={"format": "bundle"})
    with zipfile.ZipFile(io.BytesIO(bundle.content)) as archive:
        assert sum(name.startswith("catalog/") and name.endswith(".plan") for name in archive.namelist()) > 1


@pytest.fixture(scope="module")
def asked(here: ConsoleHere) -> tuple[TestClient, str]:
    """The API, and the id of a job that runs."""
    job = JobHere(here.console, "refused job").register()
    return TestClient(Starlette(routes=create_routes(here.console))), job.job_id


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/jobs/{job}/plans/in-force/export?format=docx", 422, "format: got 'docx',"),
        ("/jobs/{job}/plans/in-force/export", 422, "format: missing"),
        ("/jobs/{job}/plans/in-force/export?format=svg&pipeline=7", 422, "pipeline: got 7, expected a pipeline"),
        ("/jobs/{job}/plans/in-force/export?format=json&pipeline=0", 422, "pipeline: got 0, expected nothing"),
        ("/jobs/{job}/plans/beef/export?format=json", 404, "plan: got 'beef'"),
        ("/jobs/nobody/plans/in-force/export?format=json", 404, "job: got 'nobody'"),
        ("/plans/beef/export?format=json", 404, "plan: got 'beef'"),
    ],
)
def test_bad_requests(asked: tuple[TestClient, str], path: str, status: int, words: str) -> None:
    client, job_id = asked
    answer = client.get("/api/v1" + path.format(job=job_id))
    assert answer.status_code == status and words in answer.json()["detail"]
