"""A document or an option is read in one way or not at all; and no job takes more memory than is said."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from openrecycle.agent import cli as agent_cli
from openrecycle.agent.messages.protocol import Iteration
from openrecycle.planner import cli as planner_cli
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import BYTES_PER_OP, MAX_OPS, Job, MemoryLimit, Problem, Worker, parse_durations
from openrecycle.planner.output import run
from openrecycle.planner.plans.plan import Plan, PlanError
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import at_length, refuses
from tests.golden import golden


@pytest.fixture(scope="module")
def text() -> str:
    return make_plan(Problem(Job.uniform(2, 2, 3)), solver="list", look_ahead=False).to_json()


@pytest.fixture(scope="module")
def long_text() -> str:
    """Read worker by worker."""
    text = make_plan(Problem(Job.uniform(8, 8, 128)), solver="list", look_ahead=False).to_json()
    assert len(text) > 1_000_000
    return text


TWICE = [
    ('"kind":"F"', '"kind":"W","kind":"F"'),
    ('"W0_0":[', '"W0_0":[],"W0_0":['),
    ('"kind":"F"', '"k\\u0069nd":"W","kind":"F"'),
    ('"period":', '"period":1,"period":'),
    ('"pipelines":', '"pipelines":1,"pipelines":'),
    ('"failed":', '"failed":["W0_0"],"failed":'),
]


@pytest.mark.parametrize(
    ("which", "old", "new"),
    [
        *(("text", *keys) for keys in TWICE),
        *(("long_text", *keys) for keys in TWICE[:2]),
        *(at_length("long_text", *keys) for keys in TWICE[2:]),
    ],
)
def test_a_key_that_is_there_twice_is_refused(which: str, old: str, new: str, request: pytest.FixtureRequest) -> None:
    text: str = request.getfixturevalue(which)
    assert json.loads(text.replace(old, new, 1)) == json.loads(text), "the last of two counts for most readers"
    with pytest.raises(PlanError, match=golden("is-there-twice")):
        Plan.from_json(text.replace(old, new, 1))


@pytest.mark.parametrize("which", ["text", "long_text"])
def test_text_and_bytes_are_read_alike(which: str, request: pytest.FixtureRequest) -> None:
    text: str = request.getfixturevalue(which)
    assert Plan.from_json(text) == Plan.from_json(text.encode())


def _changed(text: str, change: str, value: object) -> str:
    document: dict[str, Any] = json.loads(text)
    at: Any = document
    *way, last = change.split(".")
    for name in way:
        at = at[int(name) if isinstance(at, list) else name]
    assert last in at
    at[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workers.W0_0.0.start", "0"),
        ("workers.W0_0.0.start", True),
        ("workers.W0_0.0.duration", "1"),
        ("workers.W0_0.0.micro_batch", True),
        ("job.pipelines", True),
        ("job.profiles.0.forward", "1"),
        ("metrics.period", True),
        ("metrics.gap", "0"),
        ("metrics.peak_activations", {"W0_0": True}),
        ("solver.seconds", "0"),
    ],
)
def test_what_is_no_number_is_none(text: str, field: str, value: object) -> None:
    with pytest.raises(PlanError, match=golden("is-not-a-plan")):
        Plan.from_json(_changed(text, field, value))


@pytest.mark.parametrize("durations", ["F=1,F=2", "F=1_000", "F=١", "F=", "F=0x1", "F=1,I=1,F=1"])
def test_durations_are_said_once_and_in_plain_digits(durations: str) -> None:
    with pytest.raises(InputError, match="--durations"):
        parse_durations(durations)


def test_durations_that_are_plain() -> None:
    assert parse_durations("F=1.5, I=2,W=1e-1,O=.5,transfer=+0") == {
        "F": 1.5,
        "I": 2,
        "W": 0.1,
        "O": 0.5,
        "transfer": 0,
    }


def test_other_scripts_digits_are_no_worker_and_no_limit() -> None:
    for name in ("W١_0", "W0_١"):
        with pytest.raises(InputError):
            Worker.parse(name)
    with pytest.raises(InputError):
        MemoryLimit.parse("٣")


def _iteration(**change: object) -> Iteration:
    fields = {"iteration": 3, "loss": 0.5, "loss_hex": (0.5).hex(), "seconds": 1.0, "generation": 1, "living": 4}
    return Iteration.model_validate_json(json.dumps(fields | change))


@pytest.mark.parametrize("value", [0.5, -0.1, 0.0, 1e-320, 1e308, float("inf"), float("nan")])
def test_a_loss_is_a_hexadecimal_float(value: float) -> None:
    assert _iteration(loss_hex=value.hex()).loss_hex == value.hex()


@pytest.mark.parametrize("field", ["iteration", "seconds", "generation", "living", "loss"])
def test_true_is_no_number(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        _iteration(**{field: True})


@pytest.mark.parametrize(
    "text", ["", "0.5", "half", "0x", "0x1.8p", "0x1p99999", "0x1.٨p+0", "0x1.8p+0 ", "<b>", "1", "infinity"]
)
def test_a_loss_that_is_no_hexadecimal_float_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="loss_hex"):
        _iteration(loss_hex=text)


def test_a_job_of_numbers_of_numpy_is_that_of_plain_ones() -> None:
    two, half = np.int64(2), np.float64(0.5)
    grid: Any = (two, two, two)
    times: Any = {"F": half, "I": two, "W": half, "O": half, "transfer": half}
    job = Job.uniform(*grid, durations=times, layers=np.int64(4), partition=(two, two))  # type: ignore[arg-type]
    sped = replace(job, speeds=((Worker(0, 1), half),), capacity_bytes=(two, two))
    plain_times = {"F": 0.5, "I": 2, "W": 0.5, "O": 0.5, "transfer": 0.5}
    plain = Job.uniform(2, 2, 2, durations=plain_times, layers=4, partition=(2, 2))
    plain = replace(plain, speeds=((Worker(0, 1), 0.5),), capacity_bytes=(2, 2))
    assert repr(sped) == repr(plain), "a document of it is written by what its numbers are"
    for wrong in (np.True_, torch.tensor(True), half, "2", np.array([2])):
        with refuses("stages"):
            Job.uniform(1, wrong, 1)  # type: ignore[arg-type]


def test_beyond_the_most_ops_a_job_is_refused_with_what_it_would_take() -> None:
    with pytest.raises(InputError, match=f"{MAX_OPS:,}"):
        Job.uniform(1, 1, MAX_OPS // 3 + 1)
    assert Job.uniform(1, 1, MAX_OPS // 3).micro_batches == MAX_OPS // 3


@pytest.mark.processes
def test_an_op_takes_no_more_memory_than_is_counted() -> None:
    """From a small plan to a larger one, made, written and read by a process of its own."""
    program = (
        "import resource, sys\nfrom openrecycle.planner.jobs.job import Job, Problem\n"
        "from openrecycle.planner.plans.plan import Plan\nfrom openrecycle.planner.solvers.portfolio import make_plan\n"
        "plan = make_plan(Problem(Job.uniform(1, 1, int(sys.argv[1]))), solver='list')\n"
        "sys.stdout.write(str(len(plan.to_json())) + ' ')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    peaks = []
    for micro_batches in (1_000, 41_000):
        done = subprocess.run([sys.executable, "-c", program, str(micro_batches)], capture_output=True, check=True)
        peaks.append(1024 * int(done.stdout.split()[1]))
    assert peaks[1] - peaks[0] < 40_000 * 3 * BYTES_PER_OP


@pytest.mark.parametrize("number", ["1_0", "4.0", " 3", "３", "0x3", ""])
def test_a_whole_number_on_a_command_line_is_digits(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command, app in (("plan --pipelines", planner_cli.app), ("launch --iterations", agent_cli.app)):
        with pytest.raises(SystemExit) as ended:
            run(app, [*command.split(), number])
        assert ended.value.code == 2
        assert golden("got-expected-a-whole-number", f"{number!r}") in capsys.readouterr().err


@pytest.mark.parametrize("number", ["1_0", " 3", "３", "1e"])
def test_a_number_on_a_command_line_is_ascii(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(planner_cli.app, ["plan", "--time-limit", number])
    assert golden("got-expected-a-number", f"{number!r}") in capsys.readouterr().err
