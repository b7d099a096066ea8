"""JSON, YAML and CSV: nothing is lost on the way out and back."""

from __future__ import annotations

import csv
import io

import pytest
import yaml
from hypothesis import given

from openrecycle.planner.check import check
from openrecycle.planner.export import EXPORTERS, format_named
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import Job, Problem, StageProfile, Technique
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import examples, refuses
from tests.golden import golden
from tests.planner.plans import listed, worked_example
from tests.planner.problems import problems


@examples(40)
@given(problem=problems(micro_batches=4))
def test_json_and_yaml_give_an_equal_plan_back(problem: Problem) -> None:
    plan = listed(problem)
    for again in (
        Plan.from_json(EXPORTERS["json"].render(plan)),
        Plan.from_document(yaml.safe_load(EXPORTERS["yaml"].render(plan))),
    ):
        assert again == plan
        assert again.to_json() == plan.to_json()  # 1 and 1.0 are equal, and not the same document
        assert again.compute_fingerprint() == plan.fingerprint
        assert not check(again)


def test_yaml_has_an_op_a_line_and_no_aliases() -> None:
    text = EXPORTERS["yaml"].render(worked_example()).decode()
    ops = [line for line in text.splitlines() if line.startswith("  - {kind: ")]
    assert len(ops) == sum(map(len, worked_example().workers.values()))
    assert "&" not in text
    assert "technique: staggered\n" in text


@pytest.mark.parametrize("name", ["1e5", "0x1f", "1_000", "12:30:00", "true", "null", "~", "ms: x", "µs", " s ", "#"])
def test_any_unit_and_fingerprint_survive_yaml(name: str) -> None:
    plan = make_plan(Problem(Job(1, 1, 1, time_unit=name)), solver="list", look_ahead=False)
    plan = plan.model_copy(update={"fingerprint": "1234567e8901"})
    text = EXPORTERS["yaml"].render(plan).decode()
    assert Plan.from_document(yaml.safe_load(text)) == plan
    assert "fingerprint: '1234567e8901'" in text  # a number to readers of YAML 1.2 if it were bare


def test_yaml_refuses_plans_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrecycle.planner.export.text_formats.MAX_OPS", 100)
    with pytest.raises(PlannerError, match=golden("d-ops-and-yaml-is")):
        EXPORTERS["yaml"].render(worked_example())


@examples(40)
@given(problem=problems())
def test_csv_has_every_op_once(problem: Problem) -> None:
    plan = listed(problem)
    rows = list(csv.DictReader(io.StringIO(EXPORTERS["csv"].render(plan).decode())))
    ops = [(name, op) for name, ops in plan.workers.items() for op in ops]
    assert len(rows) == len(ops)
    for row, (name, op) in zip(rows, ops, strict=True):
        assert (row["worker"], row["kind"]) == (name, op.kind)
        assert (int(row["home_pipeline"]), int(row["stage"])) == (op.pipeline, op.stage)
        assert row["micro_batch"] == ("" if op.micro_batch is None else str(op.micro_batch))
        assert (float(row["start"]), float(row["duration"])) == (op.start, op.duration)
        assert float(row["end"]) == pytest.approx(op.start + op.duration)
        away = name != f"W{op.pipeline}_{op.stage}"
        assert row["rerouted_from"] == (f"W{op.pipeline}_{op.stage}" if away else "")
        assert row["time_unit"] == "slot"


def test_a_spreadsheet_does_not_run_the_unit() -> None:
    job = Job(1, 1, 1, profiles=(StageProfile(),), time_unit='=HYPERLINK("x")')
    rows = list(
        csv.DictReader(
            io.StringIO(EXPORTERS["csv"].render(make_plan(Problem(job), solver="list", look_ahead=False)).decode())
        )
    )
    assert rows[0]["time_unit"] == '\'=HYPERLINK("x")'


def test_the_registry_is_what_is_promised() -> None:
    assert list(EXPORTERS) == ["chrome-trace", "torch-csv", "csv", "json", "yaml", "svg", "png"]
    plan = worked_example(Technique.STAGGERED)
    for name, entry in EXPORTERS.items():
        assert entry.name == name
        assert entry.render(plan)
    assert len({entry.suffix for entry in EXPORTERS.values()}) == len(EXPORTERS)
    with refuses("--format", "pdf"):
        format_named("pdf")


@pytest.mark.parametrize("pipeline", [-1, 3])
@pytest.mark.parametrize("name", ["torch-csv", "svg", "png"])
def test_a_pipeline_that_the_plan_has_not(name: str, pipeline: int) -> None:
    with refuses("--pipeline", pipeline):
        EXPORTERS[name].render(worked_example(), pipeline=pipeline)


def test_formats_of_the_whole_plan_take_no_pipeline() -> None:
    with pytest.raises(InputError, match="--pipeline: got 0, expected nothing: csv"):
        EXPORTERS["csv"].render(worked_example(), pipeline=0)
