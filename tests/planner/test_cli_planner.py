"""The command line as a user has it: a real process for each exit status, in-process for the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from openrecycle.planner import cli
from openrecycle.planner.catalogs.catalog import open_folder
from openrecycle.planner.cli import app, interruptible, main
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import Job, LayerProfile
from openrecycle.planner.plans.plan import Plan, job_doc
from openrecycle.planner.profiles import SHAPES, load, model_shape, shipped
from openrecycle.planner.solvers.portfolio import make_plan
from tests.golden import golden

GRID = ["--pipelines", "3", "--stages", "4", "--micro-batches", "6"]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def run(*args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planner", *args], capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.processes
def test_the_help_names_a_command_that_there_is() -> None:
    command = [sys.executable, "-m", "openrecycle", "check", "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"PYTHONPATH": ".src"}
    )
    assert "Usage: openrecycle check" in done.stdout


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    result = invoke("plan", *GRID, "--fail", "W1_2", "--memory", "none", "--solver", "list", "--out", str(path))
    assert result.exit_code == 0, result.output
    return path


def test_the_document_has_what_is_promised(plan_file: Path) -> None:
    document = json.loads(plan_file.read_text())
    jsonschema.validate(document, Plan.model_json_schema())
    assert document["schema_version"] == 1
    assert document["failed"] == ["W1_2"]
    assert {k: document["job"][k] for k in ("pipelines", "stages", "micro_batches")} == {
        "pipelines": 3,
        "stages": 4,
        "micro_batches": 6,
    }
    assert len(document["workers"]) == 11
    assert "W1_2" not in document["workers"]
    assert set(document["workers"]["W0_0"][0]) == {"kind", "pipeline", "micro_batch", "stage", "start", "duration"}
    assert set(document["metrics"]) == {
        "makespan",
        "period",
        "lower_bound",
        "gap",
        "bubble_fraction",
        "slowdown_vs_1f1b",
        "slowdown_vs_best",
        "peak_activations",
    }
    assert document["metrics"]["period"] == 27
    assert set(document["solver"]) >= {"name", "status", "seconds"}
    assert document["fingerprint"]


@pytest.mark.processes
def test_check_says_valid(plan_file: Path) -> None:
    done = run("check", str(plan_file))
    assert (done.returncode, done.stderr) == (0, "")
    assert "is valid" in done.stdout
    assert "period 27 slots, lower bound 27 (optimal)" in done.stdout


@pytest.mark.processes
def test_check_names_the_two_ops_that_clash(plan_file: Path) -> None:
    document = json.loads(plan_file.read_text())
    first, second = document["workers"]["W0_2"][4:6]
    second["start"] = first["start"]
    plan_file.write_text(json.dumps(document))
    done = run("check", str(plan_file))
    assert (done.returncode, done.stderr) == (1, "")
    for op in (first, second):
        assert f"{op['kind']} of micro-batch {op['micro_batch']} of pipeline {op['pipeline']} on W0_2" in done.stdout
    answer = json.loads(invoke("check", str(plan_file), "--json").output)
    assert answer["valid"] is False
    assert all(len(v["ops"]) == 2 for v in answer["violations"])
    assert {v["rule"] for v in answer["violations"]} == {"overlap", "precedence"}


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"schema_version": 2}', "\x00\xff"])
def test_check_of_what_is_no_plan_exits_2(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(damage, encoding="latin-1")
    with pytest.raises(PlannerError, match=golden("is-not-a-plan")):
        Plan.load(path)


@pytest.mark.processes
def test_unreadable_files_exit_2_without_a_traceback(tmp_path: Path, plan_file: Path) -> None:
    plan_file.write_text(plan_file.read_text()[:500])
    done = run("check", str(plan_file))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert str(plan_file) in done.stderr
    assert done.stderr.count("\n") == 1
    for path in (tmp_path / "missing.json", tmp_path):
        assert isinstance(error := invoke("check", str(path)).exception, PlannerError) and str(path) in str(error)


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        (["--fail", "W9_9"], "--fail", "W9_9"),
        (["--fail", "bogus"], "--fail", "bogus"),
        (["--fail", "W0_1", "--fail", "W1_1", "--fail", "W2_1"], "stage 1", golden("no-living-worker")),
        (["--memory", "0"], "--memory", "'0'"),
        (["--memory", "lots"], "--memory", "'lots'"),
        (["--technique", "magic"], "--technique", "'magic'"),
        (["--technique", "fault-free", "--fail", "W1_2"], "--technique", "'fault-free'"),
        (["--technique", "fault-free", "--memory", "2"], "1F1B holds 4", "limit is 2"),
        (["--solver", "oracle"], "--solver", "'oracle'"),
        (["--time-limit", "0"], "--time-limit", "0"),
        (["--time-limit", "nan"], "--time-limit", "nan"),
        (["--reference", "1f1b", "--time-limit", "0"], "--time-limit", "0"),
        (["--reference", "1f1b", "--solver", "oracle"], "--solver", "'oracle'"),
        (["--durations", "F=x"], "--durations", "F=x"),
        (["--durations", "Q=1"], "--durations", "Q=1"),
        (["--durations", "F=-1"], "--durations F", "-1"),
        (["--durations", "W=inf"], "--durations W", "inf"),
        (["--durations", "F=0"], "forward", "0"),
        (["--durations", "I=0,W=0"], "backward", "0"),
        (["--durations", "F=1.00000001"], "--durations F", "1.00000001"),
        (["--pipelines", "0"], "pipelines", "0"),
        (["--micro-batches", "-6"], "micro_batches", "-6"),
        (["--stages", "1000000000000"], "ops", "at most 4,000,000"),
        (["--out", "/no/such/folder/plan.json"], "--out", "/no/such/folder"),
        (["--profile", "/no/such/file"], "/no/such/file", golden("cant-be-read")),
    ],
    ids=" ".join,
)
def test_bad_input_names_field_and_value(
    args: list[str], field: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *GRID, *args])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert field in captured.err
    assert value in captured.err


def test_a_plan_that_breaks_a_rule_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **options: Any) -> Plan:
        made = make_plan(*args, **options)
        return made.model_copy(update={"metrics": made.metrics.model_copy(update={"makespan": 1})})

    monkeypatch.setattr(cli, "make_plan", wrong)
    out = tmp_path / "plan.json"
    result = invoke("plan", *GRID, "--solver", "list", "--out", str(out))
    assert isinstance(result.exception, PlannerError) and golden("the-plan-of-list-is") in str(result.exception)
    assert not out.exists() and result.stdout == ""


def test_missing_sizes_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--pipelines", "3"])
    assert "--stages" in capsys.readouterr().err


@pytest.mark.processes
def test_words_where_numbers_belong_exit_2() -> None:
    done = run("plan", "--pipelines", "three")
    assert done.returncode == 2
    assert "--pipelines" in done.stderr
    assert "Traceback" not in done.stderr


def test_summary_and_gantt_without_out() -> None:
    result = invoke("plan", *GRID, "--fail", "W1_2", "--technique", "decoupled", "--memory", "none", "--solver", "list")
    assert result.exit_code == 0
    assert "period 29 slots, lower bound 29 (optimal)" in result.output
    assert "slowdown +7.4% against fault-free 1F1B" in result.output
    rows = {line.split()[0]: line.split()[1] for line in result.output.splitlines() if line.startswith("W")}
    assert len(rows) == 11
    assert {len(row) for row in rows.values()} == {29}
    assert sum(c.islower() for c in rows["W0_2"] + rows["W2_2"]) == 18  # 6 micro-batches, 3 ops each


def test_only_slots_have_a_plural(plan_file: Path, tmp_path: Path) -> None:
    minutes = plan_file.read_text().replace('"time_unit":"slot"', '"time_unit":"min"')
    job = json.loads(minutes)["job"]
    (path := tmp_path / "profile.json").write_text(json.dumps(job))
    shown = invoke("plan", "--profile", str(path), "--solver", "list").output
    assert " min, lower bound" in shown and "mins" not in shown


def test_json_goes_to_stdout_alone() -> None:
    result = invoke("plan", *GRID, "--solver", "list", "--json")
    assert Plan.from_json(result.stdout).metrics.period == 21


@pytest.mark.processes
def test_profile_file(tmp_path: Path, plan_file: Path) -> None:
    job = json.loads(plan_file.read_text())["job"]
    job["profiles"][1] = {"forward": 2, "input_backward": 1.5, "weight_backward": 1, "optimizer": 0.5}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    result = invoke("plan", "--profile", str(path), "--solver", "list", "--json")
    assert result.exit_code == 0, result.output
    assert Plan.from_json(result.stdout).job.profiles[1].input_backward == 1.5
    path.write_text('{"pipelines": 3}')
    done = run("plan", "--profile", str(path))
    assert done.returncode == 2
    assert "stages" in done.stderr


@pytest.mark.processes
def test_the_published_schema_is_that_of_the_code() -> None:
    assert json.loads(run("schema").stdout) == Plan.model_json_schema()


def test_the_first_ctrl_c_asks_to_stop_and_the_second_stops() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.processes
def test_ctrl_c_keeps_the_best_so_far(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    args = ["--pipelines", "16", "--stages", "16", "--micro-batches", "64", "--fail", "W1_2,W3_4,W5_6,W7_6"]
    process = subprocess.Popen(
        [sys.executable, "-m", "planner", "plan", *args, "--time-limit", "120", "--out", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # The handler stands once the process no longer has Python's own SIGINT handling; until
        # then an interrupt ends it with 130, and then there is nothing to keep.
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and process.poll() is None and not _started(process.pid):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    if process.returncode == 0:
        assert "period" in out
        assert Plan.load(path).metrics.period > 0
    else:
        assert (process.returncode, err.strip()) == (130, "stopped")


def _started(pid: int) -> bool:
    """Has the process used CPU for a while? (It plans after about a second of imports.)"""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > 1.5


LAYERED = [*GRID, "--layers", "44", "--durations", "F=4,I=4,W=4", "--memory", "none", "--solver", "list"]


def test_a_plan_with_a_partition_of_its_own(tmp_path: Path) -> None:
    result = invoke("plan", *LAYERED, "--fail", "W1_2", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["partition"] == [12, 12, 8, 12] and document["job"]["partition"] == [11, 11, 11, 11]
    assert document["metrics"]["bound_over"] == "partitions" and len(document["job"]["layers"]) == 44
    jsonschema.validate(document, Plan.model_json_schema())
    given = invoke("plan", *LAYERED, "--partition", "11,11,11,11", "--fail", "W1_2", "--json")
    stay = json.loads(given.stdout)
    assert stay["partition"] == [11, 11, 11, 11] and "bound_over" not in stay["metrics"]
    assert document["metrics"]["period"] < stay["metrics"]["period"]
    path = tmp_path / "plan.json"
    path.write_text(result.stdout)
    checked = invoke("check", str(path))
    assert checked.exit_code == 0 and "12,12,8,12" in checked.stdout and "every partition" in checked.stdout
    document["metrics"]["lower_bound"] = document["metrics"]["period"]
    path.write_text(json.dumps(document))
    assert invoke("check", str(path)).exit_code == 1


def test_workers_migrate_where_they_may() -> None:
    dead = "W0_1,W1_1,W2_1"
    assert invoke("plan", *LAYERED, "--fail", dead, "--json").exit_code != 0
    result = invoke("plan", *LAYERED, "--fail", dead, "--migrate", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["metrics"]["bound_over"] == "layouts" and len(document["failed"]) == 3
    shown = invoke("plan", *LAYERED, "--fail", dead, "--migrate")
    assert golden("takes-the-place-of-3") in shown.stdout and golden("layers-per-stage") in shown.stdout


def test_layers_that_were_measured() -> None:
    sizes = ["--pipelines", "2", "--stages", "4", "--micro-batches", "4", "--profile", "gpt-3-medium"]
    result = invoke("plan", *sizes, "--partition", "auto", "--solver", "list", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert sum(document["partition"]) == len(document["job"]["layers"]) > 4


def test_models_have_one_spelling_and_their_names_are_listed(tmp_path: Path) -> None:
    sizes = ["--pipelines", "2", "--stages", "4", "--micro-batches", "4", "--solver", "list", "--json"]
    one, other = (invoke("plan", *sizes, "--profile", name) for name in ("gpt-3-6.7b", "gpt3-6.7b"))
    assert json.loads(one.stdout)["job"] == json.loads(other.stdout)["job"]
    assert set(shipped()) <= set(SHAPES) and model_shape("gpt3-6.7b") is model_shape("gpt-3-6.7b")
    with pytest.raises(PlannerError, match=", ".join(shipped())):
        load(tmp_path / "gpt-3-2.7b")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--layers", "3"], "layers"),
        (["--layers", "0"], "--layers"),
        (["--layers", "9999"], "layers"),
        (["--layers", "8", "--partition", "2,2,2"], "--partition"),
        (["--layers", "8", "--partition", "2,2,2,x"], "--partition"),
        (["--layers", "8", "--partition", "8,0,0,0"], "--partition"),
        (["--partition", "auto"], "--partition"),
        (["--partition", "2,2,2,2"], "--partition"),
        (["--migrate"], "--migrate"),
        (["--layers", "8", "--partition", "2,2,2,2", "--migrate"], "--migrate"),
    ],
)
def test_what_is_no_partition_is_refused(options: list[str], field: str) -> None:
    with pytest.raises(PlannerError) as refused:
        CliRunner().invoke(app, ["plan", *GRID, *options], catch_exceptions=False)
    assert str(refused.value).startswith(f"{field}: got")


def profile_of_two_stages(folder: Path) -> Path:
    """By layers, not as even as can be."""
    job = Job(2, 2, 2, layers=(LayerProfile(3, 3, 3), *(LayerProfile(),) * 3), partition=(2, 2))
    path = folder / "profile.json"
    path.write_text(job_doc(job).model_dump_json())
    return path


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--relayout", "sometimes"], "--relayout"),
        (["--relayout", "auto"], "--relayout"),
        (["--solver", "cp-sat", "--time-limit", "inf"], "--time-limit"),
        (["--profile", "PROFILE", "--layers", "4"], "--layers"),
        (["--profile", "PROFILE"], "--pipelines"),
    ],
)
def test_what_no_catalog_can_be_of_is_refused(tmp_path: Path, options: list[str], field: str) -> None:
    profile = str(profile_of_two_stages(tmp_path))
    options = [profile if option == "PROFILE" else option for option in options]
    refused = invoke("catalog", *GRID, "--tolerance", "1", "--out", str(tmp_path), *options).exception
    assert isinstance(refused, InputError) and refused.field == field


@pytest.mark.parametrize(("options", "partition"), [([], (2, 2)), (["--partition", "auto"], (1, 3))])
def test_a_catalog_is_of_the_partition_that_the_profile_says(
    tmp_path: Path, options: list[str], partition: tuple[int, ...]
) -> None:
    profile = ["--profile", str(profile_of_two_stages(tmp_path)), "--memory", "none", *options]
    made = invoke("catalog", *profile, "--tolerance", "0", "--out", str(tmp_path), "--jobs", "1", "--json")
    assert made.exit_code == 0, made.output
    found = open_folder(Path(json.loads(made.stdout)["folder"]))
    planned = Plan.from_json(invoke("plan", *profile, "--solver", "list", "--json").stdout)
    assert found.question.job.partition == planned.job.partition == partition


def test_a_catalog_has_a_partition_per_plan(tmp_path: Path) -> None:
    grid = ["--pipelines", "2", "--stages", "2", "--micro-batches", "4", "--layers", "6", "--tolerance", "1"]
    made = {}
    for relayout in ("auto", "never"):
        result = invoke(
            "catalog",
            *grid,
            "--out",
            str(tmp_path),
            "--jobs",
            "1",
            "--relayout",
            relayout,
            "--memory",
            "none",
            "--json",
        )
        assert result.exit_code == 0, result.output
        made[relayout] = json.loads(result.stdout)
    assert made["auto"]["folder"] != made["never"]["folder"]
    assert made["auto"]["plans"] == made["never"]["plans"] == 3


def test_migrations_with_the_layers_cut_anew() -> None:
    asked = ["migrations", *GRID, "--fail", "W0_1,W1_1", "--layers", "16", "--json"]
    free = json.loads(invoke(*asked).output)
    fixed = json.loads(invoke(*asked, "--partition", "4,4,4,4").output)
    assert sum(free["partition"]) == 16 and not fixed["partition"]
    assert free["period"] < fixed["period"]
    assert invoke("migrations", *GRID, "--partition", "auto").exit_code != 0, "there are no layers"
