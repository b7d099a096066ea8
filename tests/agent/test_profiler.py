"""The profiler: bytes counted exactly, times with their spread, and the document that it writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from openrecycle.agent.cli import app
from openrecycle.agent.config.devices import Mode, Platform, Transport
from openrecycle.agent.config.options import (
    Optimization,
    Planning,
    with_profile,
)
from openrecycle.agent.profiling import (
    SHAPES,
    MeasuringError,
    bytes_of_part,
    measure_traffic,
    pass_on,
    seconds_of,
    shape_of,
    shared_out,
    timing_of,
)
from openrecycle.agent.stages.gradients import SUM_OF
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.stage import Stage
from openrecycle.agent.transport.transfers import GenerationGroups
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Problem, Worker
from openrecycle.planner.profiles import load_profile
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import at_length

BATCH, WIDTH = 32, 128
FLOATS = 4 * BATCH * WIDTH
"""Bytes of one activation."""


@pytest.mark.parametrize("layers", [1, 3])
def test_a_stack_of_linears_holds_what_it_must(layers: int) -> None:
    """Its input and every output until I; for W the input and the output's gradient of every layer."""

    def build() -> tuple[Stage, StageOptimizer]:
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        gradients = SUM_OF["deterministic"](module.parameters(), terms=4)
        return Stage(module, gradients), StageOptimizer(module, torch.optim.Adam(module.parameters()), gradients)

    found, (y,) = bytes_of_part(build, (torch.randn(BATCH, WIDTH),), None, first=True)
    assert y.shape == (BATCH, WIDTH)
    assert found["activation_bytes"] == (layers + 1) * FLOATS
    assert found["weight_backward_bytes"] == 2 * layers * FLOATS
    parameters = layers * (WIDTH**2 + WIDTH)
    # fp32 weights, and a sum of 8 bytes per element with a few counts; beside it, the weight of a micro-batch.
    assert found["weight_bytes"] == 4 * parameters + found["reduced_bytes"] + 8
    assert 8 * parameters < found["reduced_bytes"] < 8 * parameters + 8 * 2 * layers + 64
    assert found["optimizer_bytes"] > 8 * parameters  # two moments


def test_deciles() -> None:
    timing = timing_of([n / 1000 for n in range(1, 12)])
    assert (timing.median, timing.p10, timing.p90, timing.repeats) == (6, 2, 10, 11)
    assert timing.spread == pytest.approx(8 / 6)
    assert timing_of([0.5]).spread == 0


def test_shapes_have_the_size_of_their_names() -> None:
    assert {name: round(shape.parameters / 1e9, 1) for name, shape in SHAPES.items()} == {
        "gpt-3-medium": 0.4,
        "gpt-3-3.35b": 3.5,
        "gpt-3-6.7b": 6.9,
    }
    with pytest.raises(InputError, match="gpt-3-medium"):
        shape_of("gpt5")


def test_a_layers_time_is_its_part_of_its_stages() -> None:
    alone = [{"F": [2.0, 2.0, 9.0], "O": [0.0]}, {"F": [6.0], "O": [0.0]}]
    one, other = shared_out({"F": [4.0, 8.0], "O": [1.0]}, alone)
    assert (one, other) == ({"F": [1.0, 2.0], "O": [0.5]}, {"F": [3.0, 6.0], "O": [0.5]})


def test_the_first_layer_is_not_taken_for_the_cost_of_all_of_its_stage() -> None:
    """With activation checkpointing, say, no backward is split: the first stage does all of it in W, the others in I.
    An embedding, and two layers that take ten times as long."""
    alone = [{"I": [0.0], "W": [1.0]}, {"I": [9.0], "W": [1.0]}, {"I": [10.0], "W": [0.0]}]
    found = shared_out({"I": [0.5, 0.0], "W": [20.5, 42.0]}, alone, first=True)
    assert found == [
        {"I": [0.0, 0.0], "W": [1.0, 2.0]},
        {"I": [9.0, 18.0], "W": [1.0, 2.0]},
        {"I": [10.0, 20.0], "W": [0.0, 0.0]},
    ]
    assert shared_out({"I": [2.0], "W": [4.0]}, [{"I": [0.0], "W": [0.0]}] * 2, first=True) == (
        [{"I": [1.0], "W": [2.0]}] * 2
    )


@pytest.mark.processes
@pytest.mark.parametrize("transport", [None, at_length("ordered")])
def test_traffic_between_real_processes(transport: Transport | None) -> None:
    computes_on = Platform(transport=transport)
    transfers, reductions = measure_traffic((64, 4096), 4096, 3, repeats=3, warm_up=1, computes_on=computes_on)
    assert len(transfers) == 2 and all(t.repeats == 3 and t.median > 0 for t in transfers)
    assert reductions is not None and reductions.bytes == 4096
    assert len(reductions.by_peers) == 2 and all(t.median > 0 for t in reductions.by_peers)
    assert measure_traffic((), 4096, 1, repeats=1, warm_up=0) == ((), None)


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["deterministic", at_length("fast")])
def test_peers_that_share_an_optimizer_are_measured_as_they_exchange(mode: Mode) -> None:
    optimization = Optimization(mode=mode, sharding="zero1", bucket_cap_mb=0.1)
    _, found = measure_traffic((), 1 << 20, 3, repeats=2, warm_up=1, optimization=optimization)
    assert found is not None and len(found.by_peers) == 2 and all(t.median > 0 for t in found.by_peers)


@pytest.mark.processes
def test_a_profile_of_a_sharded_optimizer_says_what_its_job_does(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    options = '{"width": 32, "heads": 2, "sequence": 16, "batch": 2, "layers": 2}'
    command = ["profile", "--workload", "openrecycle.agent.examples.gpt:Gpt", "--workload-options", options]
    sizes = ["--stages", "1", "--pipelines", "4", "--micro-batches", "1", "--repeats", "2", "--warm-up", "1"]
    sharding = ["--optimizer-sharding", "zero1", "--clip-norm", "1", "--spread-limit", "inf", "--out", str(out)]
    done = CliRunner().invoke(app, [*command, *sizes, *sharding], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    made = load_profile(out)
    assert (made.sharded_over, made.clipped) == (4, True)
    assert "clipped" not in made.model_copy(update={"clipped": False}).model_dump_json()
    # Each of 4 workers steps 2 parts of 4; of 2 that are left each steps all.
    (whole,) = made.job_for(4, 1, 1).profiles
    step, sums = sum(part.step.median for part in made.parts), made.reductions
    assert sums is not None and whole.optimizer == pytest.approx(step, abs=0.01)
    size = sum(part.reduced_bytes for part in made.parts)
    shares = [1, 1, 2 / 3, 1 / 2]
    expected = [sums.milliseconds(size, n) + step * (2 * share - 1) for n, share in enumerate(shares, start=1)]
    assert whole.reductions == pytest.approx(expected, abs=0.02)


@pytest.mark.processes
def test_a_plan_is_made_from_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    command = ["profile", "--workload", "openrecycle.agent.examples.gpt:Gpt", "--workload-options"]
    options = ['{"width": 32, "heads": 2, "sequence": 16, "batch": 2, "layers": 5}', "--stages", "2"]
    options += ["--micro-batches", "3"]
    asked = [*command, *options, "--repeats", "3", "--spread-limit", "inf", "--out", str(out)]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    made = load_profile(out)
    assert made.cut == "each" and len(made.parts) == made.layers == 5 and made.samples_per_micro_batch == 2
    assert made.boundary_bytes == 4 * 2 * 16 * 32 and made.reductions is not None
    job = made.job.job()
    assert (job.pipelines, job.stages, job.micro_batches, job.time_unit) == (2, 2, 3, "ms")
    assert job == Planning().layered(with_profile(Job.uniform(2, 2, 3), out), 5) and len(job.layers) == 5
    with pytest.raises(InputError, match="profile: got '5 layers'"):
        Planning().layered(job, 6)
    assert all(p.activation_bytes > p.weight_backward_bytes // 2 > 0 for p in job.profiles)
    assert make_plan(Problem(job), solver="list", time_limit=5).metrics.period > 0


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ([], "--model"),
        (["--model", "gpt-3-medium", "--workload", "a:b"], "--model"),
        (["--model", "gpt5"], "gpt-3-medium"),
        (["--model", "gpt-3-medium", "--stages", "25"], "at most 24"),
        (["--workload", "no.such:thing"], "--workload"),
        (["--workload", "no.such:thing", "--batch", "2"], "--batch"),
        (["--workload", "openrecycle.agent.examples.gpt:Gpt", "--workload-options", "[]"], "--workload-options"),
        (["--model", "gpt-3-medium", "--repeats", "0"], "--repeats"),
        (["--model", "gpt-3-medium", "--warm-up", "-1"], "--warm-up"),
        (["--model", "gpt-3-medium", "--threads", "1000"], "--threads"),
        (["--model", "gpt-3-medium", "--mode", "slow"], "--mode"),
        (["--model", "gpt-3-medium", "--spread-limit", "nan"], "--spread-limit"),
        (["--model", "gpt-3-medium", "--pipelines", "0"], "pipelines"),
        (["--model", "gpt-3-medium", "--out", "/no/such/folder/x.json"], "--out"),
    ],
)
def test_what_can_not_be_measured_is_said(arguments: list[str], field: str, tmp_path: Path) -> None:
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "profile.json")]
    done = CliRunner().invoke(app, ["profile", *arguments, *out], catch_exceptions=False)
    assert done.exit_code == 2 and field in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_times_that_vary_too_much_are_not_written(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    command = [
        "profile",
        "--workload",
        "openrecycle.agent.examples.gpt:Gpt",
        "--workload-options",
        '{"width": 32, "sequence": 16}',
    ]
    # No clock gives the same microseconds five times over.
    sizes = ["--stages", "1", "--pipelines", "1", "--repeats", "5", "--spread-limit", "0", "--out", str(out)]
    done = CliRunner().invoke(app, [*command, *sizes], catch_exceptions=False)
    assert done.exit_code == 2 and "layer 0 vary by" in done.stderr and not out.exists()


def test_a_profile_on_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    done = CliRunner().invoke(app, ["profile", "--model", "gpt-3-medium", "--device", "cuda", "--out", str(out)])
    assert done.exit_code == 2 and not out.exists() and "--device" in done.stderr


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_what_fails_in_any_peer_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, what the second one computes on is not there."""
    monkeypatch.setattr(Platform, "check", lambda self, workers: "")
    with pytest.raises(MeasuringError, match=r"platform\.device"):
        measure_traffic((64,), 0, 2, repeats=1, warm_up=0, computes_on=Platform(device="cuda"))


def test_messages_of_all_rounds_have_the_tag_that_nccl_has() -> None:
    passed: list[tuple[str, int]] = []

    class Line:
        def send(self, to: int, tensor: torch.Tensor, tag: int) -> Line:
            passed.append(("send", tag))
            return self

        def receive(self, source: int, buffer: torch.Tensor, tag: int) -> Line:
            passed.append(("receive", tag))
            return self

        def wait(self) -> None: ...

    line: Any = Line()
    for me in range(2):
        assert (
            len(pass_on(GenerationGroups(Worker(0, me), line, line, None, {}), me, 8, range(3), torch.device("cpu")))
            == 3
        )
    assert passed == [("send", 0), ("receive", 0)] * 3 + [("receive", 0), ("send", 0)] * 3


def test_what_a_gpu_noted_is_read_as_seconds_since_the_first() -> None:
    assert seconds_of([0.5, 0.75]) == [0.5, 0.75]
    assert seconds_of([Noted(3.0), Noted(5.0), Noted(9.0)]) == [0.0, 0.002, 0.006]


@dataclass
class Noted:
    """As a GPU's event: its time is known once it has been waited for."""

    at: float

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Noted) -> float:
        return other.at - self.at
