"""The profile that a job's workers measure by the way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from openrecycle.app.jobs.measurements import OpTimes
from openrecycle.app.plans.profiles import measured_profile
from openrecycle.planner.jobs.job import Job, LayerProfile
from openrecycle.planner.plans.plan import JobDoc


def measured(nominal: Job, reports: dict[str, dict[str, float]]) -> JobDoc | None:
    times = OpTimes()
    times.report(SimpleNamespace(worker=w, incarnation="a", op_milliseconds=ms) for w, ms in reports.items())  # type: ignore[misc]
    return measured_profile(nominal, times.smoothed)


NOMINAL = Job.uniform(3, 1, 2, durations={"F": 40, "I": 30, "W": 10, "O": 2}, time_unit="ms")


def test_medians_of_peers_and_the_rest_as_planned() -> None:
    reports = {
        "W0_0": {"F": 41.0, "I": 31.0, "W": 11.0, "O": 900.0},
        "W1_0": {"F": 43.0, "I": 33.0, "W": 13.0},
        "W2_0": {"F": 400.0, "I": 300.0, "W": 100.0},
    }
    found = measured(NOMINAL, reports)
    assert found is not None
    (stage,) = found.profiles
    assert (stage.forward, stage.input_backward, stage.weight_backward, stage.optimizer) == (43, 33, 13, 2)
    assert found.time_unit == "ms" and found.job().pipelines == 3, "and it is a job that can be planned"


def test_a_whole_backward_is_split_as_the_profile_splits_it() -> None:
    found = measured(NOMINAL, {"W0_0": {"F": 40.0, "B": 60.0}})
    assert found is not None
    assert (found.profiles[0].input_backward, found.profiles[0].weight_backward) == (45, 15)


@pytest.mark.parametrize(("unit", "scale"), [("s", 1000.0), ("slot", 0.0)])
def test_units_become_ms_and_what_is_no_time_is_left_out(unit: str, scale: float) -> None:
    nominal = Job.uniform(1, 2, 2, durations={"F": 1, "I": 1, "W": 1, "O": 3, "transfer": 0.5}, time_unit=unit)
    found = measured(nominal, {f"W0_{s}": {"F": 9.0, "I": 8.0, "W": 7.0} for s in range(2)})
    assert found is not None
    assert [p.optimizer for p in found.profiles] == [3 * scale] * 2 and found.transfers == (0.5 * scale,)


@pytest.mark.parametrize("reports", [{}, {"W0_0": {"F": 9.0}}, {"W0_0": {"I": 8.0, "W": 7.0}}])
def test_what_is_not_known_yet_is_no_profile(reports: dict[str, dict[str, float]]) -> None:
    assert measured(NOMINAL, reports) is None


def test_a_layer_with_the_least_share_still_takes_time() -> None:
    layers = (LayerProfile(0.01, 1.0, 1.0), LayerProfile(10.0, 1.0, 1.0))
    found = measured(Job(1, 1, 2, layers=layers, time_unit="ms"), {"W0_0": {"F": 0.4, "I": 1.0, "W": 1.0}})
    assert found is not None
    assert [layer.forward for layer in found.layers] == [0.001, 0.4]


@pytest.mark.parametrize("layers", [0, 2])
def test_seconds_that_are_not_binary_become_decimal_milliseconds(layers: int) -> None:
    """1000 * 1.001 has more decimals than a job may have."""
    nominal = Job.uniform(1, 2, 2, durations={"O": 1.001, "transfer": 1.001}, time_unit="s", layers=layers)
    found = measured(nominal, {f"W0_{s}": {"F": 9.0, "I": 8.0, "W": 7.0} for s in range(2)})
    assert found is not None
    assert found.job().profiles[0].optimizer == 1001 and found.job().transfers == (1001.0,)


def test_times_that_make_no_job_are_no_profile() -> None:
    """The page that offers the profiles of all jobs goes on without this one."""
    assert measured(NOMINAL, {"W0_0": {"F": 0.0, "I": 1.0, "W": 1.0}}) is None
