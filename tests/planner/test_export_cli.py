"""`export` and `compare` as a user has them."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from openrecycle.planner.cli import app, main
from openrecycle.planner.export import EXPORTERS
from openrecycle.planner.jobs.job import Technique
from openrecycle.planner.plans.plan import Plan
from tests.golden import golden
from tests.planner.plans import worked_example


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(worked_example(Technique.STAGGERED, "W1_2").to_json())
    return path


@pytest.fixture
def healthy_file(tmp_path: Path) -> Path:
    path = tmp_path / "healthy.json"
    path.write_text(worked_example(Technique.STAGGERED).to_json())
    return path


def invoke(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def run(*args: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "planner", *map(str, args)], capture_output=True, timeout=120, check=False
    )


def refusal(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """What `main` says and exits 2 with: one sentence, and nothing on standard output."""
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, args)))
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("name", [name for name in EXPORTERS if name != "torch-csv"])
def test_every_format_to_a_file_and_to_standard_output(tmp_path: Path, plan_file: Path, name: str) -> None:
    out = tmp_path / "out"
    result = invoke("export", plan_file, "--format", name, "--out", out)
    assert (result.exit_code, result.output) == (0, "")
    expected = EXPORTERS[name].render(Plan.load(plan_file))
    assert out.read_bytes() == expected
    assert invoke("export", plan_file, "--format", name).stdout_bytes == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "plan.json"]


@pytest.mark.processes
def test_a_real_process_writes_bytes(plan_file: Path) -> None:
    done = run("export", plan_file, "--format", "png")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == EXPORTERS["png"].render(Plan.load(plan_file))


def test_torch_csv_of_a_healthy_plan(healthy_file: Path) -> None:
    text = invoke("export", healthy_file, "--format", "torch-csv").stdout
    assert len(list(csv.reader(text.splitlines()))) == 4
    assert invoke("export", healthy_file, "--format", "torch-csv", "--pipeline", "2").stdout == text


@pytest.mark.processes
def test_a_reader_that_stops_early_is_no_error(plan_file: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "planner", "export", str(plan_file), "--format", "chrome-trace"],
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--format", "pdf"], "--format: got 'pdf',"),
        (["--format", "torch-csv"], golden("w1-2-failed-since-torch")),
        (["--format", "csv", "--out", "/no/such/folder/x.csv"], "--out: got '/no/such/folder/x.csv'"),
        (["--format", "csv", "--out", "/"], "--out: got '/'"),
        (["--format", "csv", "--out", "."], "--out: got '.'"),
        (["--format", "csv", "--pipeline", "1"], "--pipeline: got 1, expected nothing: csv"),
        (["--format", "svg", "--pipeline", "7"], "--pipeline: got 7,"),
    ],
)
def test_bad_options(plan_file: Path, args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, "export", plan_file, *args)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\x00"])
def test_unreadable_plans(tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    for args in (["export", path, "--format", "svg"], ["compare", path, path]):
        assert str(path) in refusal(capsys, *args)


def test_an_invalid_plan_is_named_as_such(tmp_path: Path, plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(plan_file.read_text())
    document["workers"]["W0_0"] = []
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(document))
    for args in (["export", broken, "--format", "svg"], ["compare", plan_file, broken]):
        assert golden("broken-json-is-not-a") in refusal(capsys, *args)


def test_compare_shows_a_table(plan_file: Path, healthy_file: Path) -> None:
    result = invoke("compare", healthy_file, plan_file)
    assert result.exit_code == 0
    lines = {line[:32].strip(): line[32:].split() for line in result.stdout.splitlines()}
    a, b = Plan.load(healthy_file).metrics, Plan.load(plan_file).metrics
    assert lines["period"][:2] == [f"{a.period:g}", f"{b.period:g}"]
    assert lines["period"][2] == f"({b.period / a.period - 1:+.1%})"
    assert lines["workers out"] == ["none", "W1_2"]
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_compare_in_json(plan_file: Path, healthy_file: Path) -> None:
    result = invoke("compare", healthy_file, plan_file, plan_file, "--json")
    answer = json.loads(result.stdout)
    assert answer["plans"] == [str(healthy_file), str(plan_file), str(plan_file)]
    assert answer["period"][1] == answer["period"][2] == Plan.load(plan_file).metrics.period
    assert answer["rerouted_ops"][0] == 0 < answer["rerouted_ops"][1] == answer["rerouted_ops"][2]
    assert all(len(values) == 3 for values in answer.values())


@pytest.mark.parametrize("count", [1, 5])
def test_compare_takes_two_to_four(plan_file: Path, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "compare", *[plan_file] * count)
    assert f"PLAN.json: got {count}, expected 2 to 4 plans" in said
