"""Measured profiles: from parts to the job of a grid, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from openrecycle.planner.cli import app
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.jobs.job import MAX_LAYERS, Problem
from openrecycle.planner.plans.plan import PlanError, read_model
from openrecycle.planner.profiles import (
    Hardware,
    Measurements,
    Part,
    Profile,
    Reductions,
    Timing,
    job_on,
    load_profile,
    shipped,
    spread_layers,
)
from openrecycle.planner.solvers.portfolio import make_plan

HARDWARE = Hardware(
    processor="test", cores=2, system="test", torch="2", threads=1, dtype="float32", clock="cpu", load=0.0,
    measured_on="2026-01-31",
)  # fmt: skip


def timing(ms: float, spread: float = 0.0) -> Timing:
    return Timing(median=ms, p10=ms * (1 - spread / 2), p90=ms * (1 + spread / 2), repeats=5)


def part(name: str, f: float, i: float, w: float, step: float = 1.0, size: int = 1000) -> Part:
    return Part(
        name=name, forward=timing(f), input_backward=timing(i), weight_backward=timing(w), step=timing(step),
        activation_bytes=10 * size, weight_backward_bytes=8 * size, weight_bytes=3 * size, optimizer_bytes=2 * size,
        reduced_bytes=size,
    )  # fmt: skip


def layered(layers: int = 6) -> Measurements:
    return Measurements(
        model="toy", about="a toy", samples_per_micro_batch=1, mode="fast", hardware=HARDWARE,
        cut="layers", layers=layers,
        parts=(part("embedding", 1, 0, 1), part("layer", 10, 10, 10), part("head", 5, 5, 5)),
        boundary_bytes=64, transfers=(timing(2.0),),
        reductions=Reductions(bytes=1000, by_peers=(timing(4.0), timing(6.0))),
    )  # fmt: skip


def test_layers_make_the_stages_of_any_grid() -> None:
    job = layered().job_for(3, 3, 4)
    assert [p.forward for p in job.profiles] == [21, 20, 25]
    assert [p.weight_backward for p in job.profiles] == [21, 20, 25]
    assert [p.input_backward for p in job.profiles] == [20, 20, 25]
    assert [p.weight_bytes for p in job.profiles] == [9000, 6000, 9000]
    assert job.transfers == (2.0, 2.0) and job.time_unit == "ms"
    # Two layers and an embedding are 3,000 bytes: three times what was measured.
    assert job.profiles[0].reductions == (0, 12, 18) and job.profiles[1].reductions == (0, 8, 12)


def test_larger_groups_than_measured_grow_as_a_ring_does() -> None:
    reductions = Reductions(bytes=1000, by_peers=(timing(4.0), timing(6.0)))
    assert reductions.milliseconds(1000, 1) == 0
    assert reductions.milliseconds(500, 3) == 3
    assert reductions.milliseconds(1000, 6) == pytest.approx(6 * (5 / 6) / (2 / 3))


@given(
    st.lists(st.floats(0.1, 100), min_size=3, max_size=3),
    st.integers(1, 20),
    st.integers(1, 20),
)
def test_layers_are_spread_as_evenly_as_can_be(times: list[float], layers: int, stages: int) -> None:
    """Moving one layer from the fullest stage to any other never lowers the fullest."""
    parts = tuple(part(str(n), t, t, t) for n, t in enumerate(times))
    if stages > layers:
        with pytest.raises(InputError, match="--stages"):
            spread_layers(parts, layers, stages)
        return
    counts = spread_layers(parts, layers, stages)
    assert sum(counts) == layers and min(counts) >= 1
    first, layer, last = (3 * t for t in times)
    load = [layer * n for n in counts]
    load[0] += first
    load[-1] += last
    fullest = max(range(stages), key=lambda s: load[s])
    if counts[fullest] > 1:
        assert all(load[s] + layer >= load[fullest] - 1e-6 for s in range(stages) if s != fullest)


def test_the_document_round_trips_and_plans(tmp_path: Path) -> None:
    made = layered().profile(2, 3, 4)
    path = tmp_path / "toy.json"
    path.write_text(made.model_dump_json())
    assert load_profile(path) == made
    assert made.job.job() == made.job_for(2, 3, 4)
    plan = make_plan(Problem(made.job.job()), solver="list", time_limit=5)
    assert plan.metrics.period >= 4 * 75

    def planned(*options: str) -> dict[str, Any]:
        result = CliRunner().invoke(
            app, ["plan", "--profile", str(path), "--solver", "list", "--json", *options], catch_exceptions=False
        )
        assert result.exit_code == 0
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    assert planned()["metrics"]["period"] == plan.metrics.period
    assert planned("--pipelines", "4", "--stages", "2")["job"]["stages"] == 2


def each() -> Measurements:
    """Four layers, of which the last is as long as the others together."""
    return layered().model_copy(
        update={
            "cut": "each",
            "layers": 4,
            "parts": (*(part(f"layer {k}", 10, 10, 10) for k in range(3)), part("layer 3", 30, 30, 30, size=2000)),
            "transfers": (timing(1.0), timing(2.0), timing(3.0)),
        }
    )


def test_layers_that_were_all_measured_make_the_stages_of_any_grid() -> None:
    job = each().job_for(2, 2, 4)
    assert [p.forward for p in job.profiles] == [30, 30] and job.transfers == (3.0,)
    assert [p.reductions for p in job.profiles] == [(0, 12), (0, 8)]
    three = each().layered_job_for(2, 3, 4)
    assert each().job_for(2, 3, 4).profiles == three.profiles and three.partition == (2, 1, 1)
    assert each().job_for(2, 3, 4).transfers == three.transfers == (2.0, 3.0)
    with pytest.raises(InputError, match="--stages: got 5"):
        each().job_for(2, 5, 4)


def test_layers_that_were_all_measured_may_move() -> None:
    made = each().profile(2, 2, 4)
    job = made.job.job()
    assert job.partition == (3, 1) and [layer.transfer for layer in job.layers[:-1]] == [1.0, 2.0, 3.0]
    assert job.with_partition((2, 2)).profiles[1].forward == 40 and job.with_partition((2, 2)).transfers == (2.0,)
    assert job_on(made, 3, 4, 4, by_layers=True).profiles[3].forward == 30
    assert read_model(Profile, made.model_dump_json()) == made


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"cut": "each"}, "3 layers have 2 transfers, not 1"),
        ({"layers": 0}, "at least 1 layer"),
        ({"transfers": []}, "1 transfer"),
        ({"profile_version": 2}, "profile_version"),
        ({"samples_per_micro_batch": 0}, "samples_per_micro_batch"),
        ({"sharded_over": 10**400}, "sharded_over"),
        ({"reductions": {"bytes": 10**400, "by_peers": []}}, "reductions"),
        ({"parts": [part("x", 1, 1, 1).model_dump() | {"reduced_bytes": 10**400}] * 3}, "reduced_bytes"),
        ({"hardware": {"clock": "sun"}}, "hardware"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_is_wrong_with_a_profile_is_named(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    document = json.loads(layered().profile(2, 3, 4).model_dump_json()) | change
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=field):
        load_profile(path)


def test_a_time_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="p10"):
        Timing(median=1.0, p10=2.0, p90=3.0, repeats=1)


def test_a_measured_stage_is_not_cut_again() -> None:
    stages = layered().model_copy(
        update={"cut": "stages", "layers": 0, "transfers": (timing(1.0), timing(2.0)), "reductions": None}
    )
    assert stages.job_for(2, 3, 4).transfers == (1.0, 2.0)
    with pytest.raises(InputError, match=r"--stages: got 4, expected 3"):
        stages.job_for(2, 4, 4)


def test_the_spread_is_that_of_what_takes_time() -> None:
    """A step of microseconds may vary as it likes."""
    calm = part("x", 10, 10, 10).model_copy(update={"step": timing(0.01, 1.0)})
    assert calm.spread < 0.01
    wild = part("x", 10, 10, 10).model_copy(update={"weight_backward": timing(10, 0.5)})
    assert wild.spread == pytest.approx(0.5)


@pytest.mark.parametrize("name", shipped())
def test_shipped_profiles_plan(name: str) -> None:
    made = load_profile(name)
    assert made.model == name and made.hardware.processor and made.spread < 1
    assert all(p.forward.median > 0 and p.weight_bytes > 0 for p in made.parts)
    job = made.job_for(3, 4, 6)
    plan = make_plan(Problem(job), solver="list", time_limit=10)
    heaviest = max(p.forward + p.input_backward + p.weight_backward for p in job.profiles)
    assert plan.metrics.period >= 6 * heaviest


@pytest.mark.parametrize("layers", [MAX_LAYERS + 1, 10**9, 10**30])
def test_more_layers_than_a_job_may_have_are_refused_at_once(layers: int, tmp_path: Path) -> None:
    """Whoever may save a profile would else hold a thread of the console for ever: layers are dealt one by one."""
    document = json.loads(load_profile(next(name for name in shipped() if by_layers(name))).model_dump_json())
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**document, "layers": layers}))
    with pytest.raises(PlannerError, match="layers"):
        load_profile(path)


def by_layers(name: str) -> bool:
    return load_profile(name).cut == "layers"
