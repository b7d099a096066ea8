"""The published tables come out of the simulation: Oobleck's Table 2 and ReCycle's Table 1."""

from __future__ import annotations

from pathlib import Path

import pytest

import openrecycle.planner.simulation
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.simulation.engine import SimulationOutcome, simulate
from openrecycle.planner.simulation.policies import READY_AFTER, published, read_costs, read_throughput
from openrecycle.planner.simulation.traces import Trace, parse_trace, read_trace
from tests.golden import golden
from tests.planner.problems import periodic

DATA = Path(openrecycle.planner.simulation.__file__).parent / "data"
OOBLECK = DATA / "oobleck"
THROUGHPUT, COSTS = OOBLECK / "throughput-by-node-count.csv", OOBLECK / "cost-constants.csv"

# Samples/s with a loss every 6 h, 1 h and 10 min, as published.
TABLE_2 = {
    ("bamboo", "bert-large"): (77.04, 75.60, 69.84),
    ("bamboo", "gpt-2"): (17.47, 17.13, 16.01),
    ("varuna", "bert-large"): (259.57, 245.39, 168.15),
    ("varuna", "gpt-2"): (86.42, 83.94, 69.67),
    ("varuna", "gpt-3-medium"): (29.52, 27.61, 20.71),
    ("varuna", "gpt-3-2.7b"): (7.27, 6.41, 0.36),
    ("varuna", "gpt-3-6.7b"): (4.02, 2.91, 0.12),
    ("oobleck", "bert-large"): (287.10, 286.28, 282.11),
    ("oobleck", "gpt-2"): (85.59, 85.42, 84.80),
    ("oobleck", "gpt-3-medium"): (29.30, 29.21, 28.70),
    ("oobleck", "gpt-3-2.7b"): (7.29, 7.23, 6.89),
    ("oobleck", "gpt-3-6.7b"): (4.33, 4.22, 3.55),
}
# Intervals that the paper does not give: what its authors' simulators print for them.
BETWEEN = {
    ("bamboo", "bert-large"): (77.006, 75.459),
    ("bamboo", "gpt-2"): (17.460, 17.158),
    ("oobleck", "bert-large"): (286.914, 285.151),
    ("oobleck", "gpt-2"): (85.560, 85.225),
    ("oobleck", "gpt-3-medium"): (29.281, 29.114),
    ("oobleck", "gpt-3-2.7b"): (7.277, 7.180),
    ("oobleck", "gpt-3-6.7b"): (4.308, 4.112),
}


def run(policy: str, model: str, trace: Trace) -> SimulationOutcome:
    return simulate(trace, published(policy, THROUGHPUT, COSTS, model), ready_after=READY_AFTER)


@pytest.mark.parametrize(("policy", "model"), TABLE_2)
def test_oobleck_table_2(policy: str, model: str) -> None:
    for trace, cell in zip(("6h", "1h", "10m"), TABLE_2[policy, model], strict=True):
        average = run(policy, model, read_trace(OOBLECK / f"{trace}.csv")).average_samples_per_second
        if cell < 1:
            assert average < 1
        else:
            assert average == pytest.approx(cell, rel=0.05 if policy == "varuna" else 0.005)


@pytest.mark.parametrize(("policy", "model"), BETWEEN)
def test_other_intervals(policy: str, model: str) -> None:
    for trace, printed in zip(("3h", "30m"), BETWEEN[policy, model], strict=True):
        average = run(policy, model, read_trace(OOBLECK / f"{trace}.csv")).average_samples_per_second
        assert average == pytest.approx(printed, rel=0.0005)


def test_bamboo_without_the_artefact() -> None:
    """The loss of a node that stands by costs nothing but that node."""
    for model, cells in (("bert-large", (83.91, 82.78, 73.29)), ("gpt-2", (19.02, 18.77, 16.68))):
        for trace, cell in zip(("6h", "1h", "10m"), cells, strict=True):
            outcome = run("bamboo-corrected", model, read_trace(OOBLECK / f"{trace}.csv"))
            assert outcome.average_samples_per_second == pytest.approx(cell, rel=0.005)


def test_out_of_memory_trains_nothing() -> None:
    outcome = run("bamboo", "gpt-3-medium", read_trace(OOBLECK / "1h.csv"))
    assert (outcome.average_samples_per_second, outcome.goodput, outcome.ettr) == (0, 0, 0)
    assert outcome.dollars_per_million_samples(1.0) is None


@pytest.mark.parametrize("name", ["scale_gcp-trace.csv", "scale_p3-trace.csv"])
def test_traces_with_returns(name: str) -> None:
    """Nodes come back here: more is trained than with the fewest nodes, less than with the most."""
    trace = read_trace(OOBLECK / name)
    for policy in ("oobleck", "varuna", "bamboo", "bamboo-corrected"):
        table = read_throughput(THROUGHPUT, policy.split("-")[0], "gpt-2")
        outcome = run(policy, "gpt-2", trace)
        assert 0 < outcome.average_samples_per_second < table.best
        assert 0 < outcome.goodput < outcome.ettr < 1
        assert outcome.failures == sum(event.action == "remove" for event in trace.events if event.time < trace.end)
    assert run("oobleck", "gpt-2", trace).average_samples_per_second > table.at(15)


# -- ReCycle ---------------------------------------------------------------------------------------

TABLE_1 = {
    ("oobleck", "gpt-3-medium"): (27.26, 25.37, 19.47),
    ("oobleck", "gpt-3-3.35b"): (14.55, 13.44, 9.78),
    ("oobleck", "gpt-3-6.7b"): (4.98, 4.65, 2.78),
    ("recycle", "gpt-3-medium"): (27.27, 25.42, 22.27),
    ("recycle", "gpt-3-3.35b"): (14.59, 14.17, 12.63),
    ("recycle", "gpt-3-6.7b"): (5.17, 4.85, 3.53),
}


def recycle(policy: str, model: str, trace: Trace) -> SimulationOutcome:
    folder = DATA / "recycle"
    return simulate(
        trace, published(policy, folder / "throughput-by-gpu-count.csv", folder / "cost-constants.csv", model)
    )


@pytest.mark.parametrize(("policy", "model"), TABLE_1)
def test_recycle_table_1(policy: str, model: str) -> None:
    """One cost per system and model, three intervals."""
    for hours, cell in zip((6, 2, 0.5), TABLE_1[policy, model], strict=True):
        outcome = recycle(policy, model, periodic(24, hours, 100))
        assert outcome.average_samples_per_second == pytest.approx(cell, rel=0.03)


def test_recycle_averages_over_its_trace() -> None:
    trace = read_trace(DATA / "recycle" / "gcp-6h.txt")
    assert recycle("recycle", "gpt-3-larger", trace).average_samples_per_second == pytest.approx(10.80, rel=0.005)
    small = recycle("recycle", "gpt-3-350m", trace).average_samples_per_second
    assert small == pytest.approx(19.37, rel=0.005)
    # "Up to 1.64x Bamboo": the 350M model on this trace, where Bamboo has 11.75.
    assert small / 11.75 == pytest.approx(1.64, rel=0.01)


def test_up_to_1_46() -> None:
    """GPT-3 Medium with a failure every 30 min, over Bamboo's 15.24; no Oobleck cell gives as much."""
    trace = periodic(24, 0.5, 100)
    ours = {m: recycle("recycle", m, trace).average_samples_per_second for _, m in TABLE_1}
    theirs = {m: recycle("oobleck", m, trace).average_samples_per_second for _, m in TABLE_1}
    assert ours["gpt-3-medium"] / 15.24 == pytest.approx(1.46, rel=0.03)
    assert 1.2 < max(ours[m] / theirs[m] for m in ours) < 1.4


# -- bad tables --------------------------------------------------------------------------------------

HEAD = "system,model,nodes,samples_per_second\n"
COST_HEAD = "system,model,samples_per_iteration,failure_pause_s,checkpoint_save_s,checkpoint_every_iterations\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "line 1"),
        (HEAD + "oobleck,m,x,1\n", "line 2 nodes: got 'x'"),
        (HEAD + "oobleck,m,15,-1\n", "line 2 samples_per_second: got '-1'"),
        (HEAD + "oobleck,m,15,nan\n", "got 'nan'"),
        (HEAD + "oobleck,m,15,1\noobleck,m,15,2\n", "line 3 nodes"),
        (HEAD + "oobleck,m,15\n", "line 2"),
        (HEAD + "oobleck,other,15,1\n", "for oobleck one of other"),
        (HEAD + "varuna,m,15,1\n", golden("one-of-the-systems-varuna")),
    ],
)
def test_bad_throughput(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_throughput(path, "oobleck", "m")
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_a_device_is_no_table() -> None:
    for read in (read_throughput, read_costs):
        with pytest.raises(InputError, match="/dev/zero"):
            read(Path("/dev/zero"), "oobleck", "m")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("varuna,m,0,1,1,1", "samples_per_iteration"),
        ("varuna,m,8,1-2,1,1", "failure_pause_s"),
        ("varuna,m,8,1,1,1.5", "checkpoint_every_iterations"),
        ("varuna,m,8,1,1,0", "checkpoint_every_iterations"),
        ("varuna,m,8,1,x,1", "checkpoint_save_s"),
    ],
)
def test_bad_costs(tmp_path: Path, row: str, said: str) -> None:
    path = tmp_path / "c.csv"
    path.write_text(COST_HEAD + row + "\n")
    with pytest.raises(InputError, match=said):
        read_costs(path, "varuna", "m")


def test_policy_that_is_none() -> None:
    with pytest.raises(InputError, match="--policy"):
        published("other", THROUGHPUT, COSTS, "gpt-2")


def test_varuna_needs_a_checkpoint_cost(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text(COST_HEAD + "varuna,gpt-2,8,1,,\n")
    with pytest.raises(InputError, match="checkpoint_save_s"):
        published("varuna", THROUGHPUT, path, "gpt-2")


def test_overlapping_losses_restart_the_pause() -> None:
    rows = "".join(f"0,add,n{i}\n" for i in range(20)) + "600000,remove,n1\n601000,remove,n2\n900000,remove,n3\n"
    whole = run("oobleck", "gpt-2", parse_trace(rows, name="two"))
    rates = [(time / 1e6, rate) for time, rate in whole.rates]
    assert [time for time, rate in rates if not rate] == [45, 600]
    assert rates[-1][0] == pytest.approx(603)
