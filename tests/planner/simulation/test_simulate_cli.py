"""`openrecycle simulate`: one JSON object per policy, and refusals with exit status 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import openrecycle.planner.simulation
from openrecycle.planner import cli
from openrecycle.planner.catalogs.catalog import create_folder
from openrecycle.planner.jobs.job import Job, MemoryLimit, StageProfile, Technique
from openrecycle.planner.plans.packed import CatalogQuestion
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.simulation.policies import CUT_ANEW, PLANNED
from tests.golden import golden

DATA = Path(openrecycle.planner.simulation.__file__).parent / "data"
OOBLECK = DATA / "oobleck"
TABLES = ["--throughput", str(OOBLECK / "throughput-by-node-count.csv"), "--costs", str(OOBLECK / "cost-constants.csv")]
SIZES = ["--pipelines", "3", "--stages", "4", "--micro-batches", "6"]
TRACE = ["--trace", str(DATA / "recycle" / "gcp-6h.txt")]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", *args])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *args: run(capsys, *args)


def test_measured_tables(simulate: Any) -> None:
    names = ["oobleck", "varuna", "bamboo", "bamboo-corrected"]
    code, out, _ = simulate(
        "--policy", "oobleck", "--policy", "varuna,bamboo,bamboo-corrected", "--trace", str(OOBLECK / "10m.csv"),
        *TABLES, "--model", "gpt-2", "--json",
    )  # fmt: skip
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["policy"] for row in rows] == names
    for row, average in zip(rows, (84.80, 69.67, 16.01, 16.68), strict=True):
        assert row["average_samples_per_second"] == pytest.approx(average, rel=0.005)
        assert row["model"] == "gpt-2" and row["trace"] == "10m.csv" and row["failures"] == 14
        assert 0 < row["goodput"] <= row["ettr"] <= 1 and row["iterations_lost"] >= 0
        assert row["hours"] == pytest.approx(2.505)


def test_planned(simulate: Any) -> None:
    code, out, _ = simulate("--policy", "fault-free,recycle,spares,ours", *TRACE, *SIZES, "--spares", "3", "--json")
    rows = {row["policy"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0 and list(rows) == ["fault-free", "recycle", "spares-3", "ours"]
    assert rows["fault-free"]["goodput"] > rows["ours"]["goodput"]
    assert rows["spares-3"]["dollars"] > rows["ours"]["dollars"]


def test_throughput_over_time(simulate: Any) -> None:
    code, out, _ = simulate("--policy", "recycle", *TRACE, *SIZES, "--json", "--over-time")
    points = json.loads(out)["throughput_over_time"]
    assert code == 0 and points[0][0] == 0 and len(points) > 20
    assert [hour for hour, _ in points] == sorted(hour for hour, _ in points) and points[-1][0] < 6.32
    assert simulate("--policy", "recycle", *TRACE, *SIZES, "--over-time")[0] == 2


def test_a_profile_and_sizes_beside_it(simulate: Any) -> None:
    profile = str(DATA / "recycle" / "grid-6x4-larger.json")
    options = ["--technique", "decoupled", "--memory", "none", "--samples", "240", "--json"]
    options += ["--cost", "detect=0,recover=0.1,rejoin=0,migrate=0"]
    code, out, _ = simulate("--policy", "recycle", *TRACE, "--profile", profile, *options)
    assert code == 0 and json.loads(out)["average_samples_per_second"] == pytest.approx(10.80, rel=0.02)
    code, out, _ = simulate(
        "--policy", "recycle", *TRACE, "--profile", profile, "--pipelines", "3", "--stages", "4", "--json"
    )
    assert code == 0 and json.loads(out)["model"] == "grid-6x4-larger.json"
    code, _, err = simulate("--policy", "recycle", *TRACE, "--profile", profile, "--stages", "3")
    assert code == 2 and "--stages: got 3, expected 4" in err
    code, _, err = simulate("--policy", "recycle", *TRACE, "--profile", profile, "--durations", "F=2")
    assert code == 2 and "--durations: got 'F=2'" in err


def test_a_measured_profile_takes_the_sizes_that_plan_takes(simulate: Any) -> None:
    code, out, err = simulate(
        "--policy", "fault-free", *TRACE, "--profile", "gpt-3-medium",
        "--pipelines", "3", "--stages", "8", "--micro-batches", "4", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["average_samples_per_second"] > 0


def test_a_table_for_people(simulate: Any) -> None:
    code, out, _ = simulate("--policy", "recycle", *TRACE, *SIZES)
    assert code == 0 and "recycle" in out and "27 workers lost" in out


def test_drawn_failures_and_a_sweep(simulate: Any) -> None:
    drawn = ["--hours", "24", "--repair", "0.5", "--seed", "7"]
    args = ["--policy", "recycle,checkpoint-restart", "--model", "gpt-3-medium", *SIZES, *drawn, "--mtbf", "20"]
    code, out, _ = simulate(*args, "--json")
    assert code == 0 and len(out.splitlines()) == 2
    assert simulate(*args, "--json")[1] == out
    code, swept, _ = simulate(*args, "--mtbf", "200", "--json")
    rows = [json.loads(line) for line in swept.splitlines()]
    assert [row["mtbf_hours"] for row in rows] == [20, 20, 200, 200]
    assert rows[0]["goodput"] < rows[2]["goodput"]
    code, text, _ = simulate(*args, "--mtbf", "200")
    assert code == 0 and golden("mean-time-between-failures") in " ".join(text.split())
    code, shared, _ = simulate(
        "--policy", "recycle", *SIZES, *drawn, "--host-mtbf", "50", "--rack", "6:90", "--switch", "12:200", "--json"
    )
    assert code == 0 and json.loads(shared)["failures"] > 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--policy", "oobleck", *TRACE, *TABLES], "--model"),
        (["--policy", "oobleck", *TRACE, *TABLES[:2], "--model", "gpt-2"], "--costs"),
        (["--policy", "oobleck", *TRACE, *TABLES, "--model", "gpt-9"], golden("no-row-for-oobleck-gpt-9")),
        (["--policy", "other", *TRACE, *TABLES, "--model", "gpt-2"], "--policy: got 'other'"),
        (["--policy", "oobleck", *TRACE, *TABLES, "--model", "gpt-2", "--stages", "4"], "--stages"),
        (["--policy", "oobleck", "--mtbf", "5", *TABLES, "--model", "gpt-2"], "--trace"),
        (["--policy", "other", *TRACE, *SIZES], "--policy: got 'other'"),
        (["--policy", "recycle", *SIZES, "--mtbf", "0"], "--mtbf: got 0"),
        (["--policy", "recycle", *SIZES, "--mtbf", "5", "--repair", "nan"], "--repair: got nan"),
        (["--policy", "recycle", *SIZES, "--mtbf", "5", "--shape", "0"], "--shape: got 0"),
        (["--policy", "recycle", *SIZES, "--mtbf", "5", "--hours", "inf"], "--hours: got inf"),
        (["--policy", "recycle", *SIZES, "--host-mtbf", "-1"], "--host-mtbf: got -1"),
        (["--policy", "recycle", *SIZES, "--rack", "0:5"], "--rack: got 0"),
        (["--policy", ",", *TRACE, *SIZES], "--policy"),
        (["--policy", "recycle", *SIZES], "--trace"),
        (["--policy", "recycle", *TRACE, "--mtbf", "3", *SIZES], "--mtbf: got"),
        (["--policy", "recycle", *TRACE, *SIZES[:4]], "--micro-batches"),
        (["--policy", "recycle", *TRACE, *SIZES, "--cost", "speed=1"], "--cost: got 'speed=1'"),
        (["--policy", "recycle", *TRACE, *SIZES, "--memory", "lots"], "--memory"),
        (["--policy", "recycle", *TRACE, *SIZES, "--technique", "magic"], "--technique"),
        (["--policy", "recycle", *SIZES, "--rack", "many"], "--rack: got 'many'"),
        (["--policy", "recycle", *SIZES, "--mtbf", "-1"], "mtbf: got -1.0"),
        (["--policy", "recycle", *SIZES, "--mtbf", "nan"], "mtbf: got nan"),
        (["--policy", "recycle", *TRACE, "--model", "gpt-3-medium"], "--pipelines"),
        (["--policy", "recycle", "--trace", "none.csv", *SIZES], "none.csv"),
        (["--policy", "recycle", *TRACE, *SIZES, "--catalog", "none"], "none"),
        # Also what this simulation has no use for.
        (["--policy", "recycle", *TRACE, *SIZES, "--spares", "-1"], "--spares: got -1"),
        (["--policy", "recycle", *TRACE, *SIZES, "--repair", "-1"], "--repair: got -1"),
        (["--policy", "recycle", *TRACE, *SIZES, "--shape", "0"], "--shape: got 0"),
        (["--policy", "recycle", *TRACE, *SIZES, "--hours", "0"], "--hours: got 0"),
        (["--policy", "recycle", *TRACE, *SIZES, "--host-mtbf", "0"], "--host-mtbf: got 0"),
        (["--policy", "oobleck", *TRACE, *TABLES, "--model", "gpt-2", "--samples", "0"], "--samples: got 0"),
        (["--policy", "oobleck", *TRACE, *TABLES, "--model", "gpt-2", "--stages", "0"], "--stages: got 0"),
        (["--policy", "oobleck", *TRACE, *TABLES, "--model", "gpt-2", "--least-stages", "0"], "--least-stages: got 0"),
    ],
)
def test_refusals(simulate: Any, args: list[str], said: str) -> None:
    code, out, err = simulate(*args)
    assert code == 2 and out == "" and "Traceback" not in err
    assert said in err


@pytest.mark.parametrize("middle", [1, 3])
def test_beside_a_catalog_no_policy_is_credited_with_balance(middle: int, simulate: Any, tmp_path: Path) -> None:
    """Its plans are for stages as they are given. Where those are balanced, nobody trains faster than the fault-free
    job; else only policies that keep them are compared."""
    job = Job(2, 3, 4, profiles=(StageProfile(), StageProfile(middle, middle, middle), StageProfile()))
    profile, quiet = tmp_path / "profile.json", tmp_path / "quiet.csv"
    profile.write_text(job_doc(job).model_dump_json())
    quiet.write_text("".join(f"0,add,w{i}\n" for i in range(6)) + "3600,remove,w5\n")
    question = CatalogQuestion(job, Technique.STAGGERED, MemoryLimit("uniform"))
    folder = create_folder(tmp_path, question)[1].path

    def goodput(*policies: str) -> tuple[int, dict[str, float], str]:
        code, out, err = simulate(
            "--policy", ",".join(policies), "--trace", str(quiet), "--profile", str(profile),
            "--catalog", str(folder), "--json",
        )  # fmt: skip
        return code, {row["policy"]: row["goodput"] for row in map(json.loads, out.splitlines())}, err

    keeping = tuple(name for name in PLANNED if name not in CUT_ANEW)
    code, rows, _ = goodput(*(PLANNED if middle == 1 else keeping))
    assert code == 0 and max(rows.values()) <= 1.001
    for name in CUT_ANEW if middle > 1 else ():
        code, _, err = goodput("recycle", name)
        assert code == 2 and golden("catalog-none-with", name) in err


def test_a_bad_trace_is_named(simulate: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0,add,a\n5,drop,a\n")
    code, _, err = simulate("--policy", "recycle", "--trace", str(path), *SIZES)
    assert code == 2 and "bad.csv line 2: got 'drop'," in err
