"""Real processes, real SIGKILL: every loss and every parameter keeps its bits, no survivor restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.runs import ITERATIONS, Run, fault_free, small
from tests.conftest import at_length
from tests.golden import golden

# One test process for all of these: they share the fault-free run they compare with.
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def reference() -> Run:
    return fault_free()


def _same_bits(run: Run, reference: Run) -> None:
    assert run.status == 0, run.errors
    assert run.losses == reference.losses
    assert [line["iteration"] for line in run.iterations] == list(range(ITERATIONS))
    assert run.final == reference.final


@pytest.mark.parametrize(
    ("moment", "kill"),
    [
        at_length(golden("before-anything-else"), "W0_0@0:F0"),
        at_length("warm-up", "W1_0@2:F1"),
        ("steady state", "W0_1@3:I1"),
        at_length("steady state, a weight gradient", "W1_2@3:W2"),
        at_length("cool-down", "W0_2@3:W3"),
        at_length(golden("cool-down-of-the-first-stage"), "W1_0@2:I3"),
        at_length("during the reduction", "W1_1@3:R"),
        at_length(golden("right-before-the-step"), "W0_1@3:O"),
        at_length(golden("right-before-the-first-stages"), "W0_0@5:O"),
    ],
)
def test_one_death(moment: str, kill: str, reference: Run, tmp_path: Path) -> None:
    run = small(tmp_path / "run.jsonl", "--kill", kill)
    _same_bits(run, reference)
    # A death right before the last step may leave nothing to redo: the others have it already.
    if not kill.startswith("W0_0@5"):
        (failure,) = run.failures
        assert failure["worker"] == kill[:4] and failure["death_known"]
        # A survivor whose connection breaks leaves the iteration by itself, maybe before the launcher sees the death.
        seen, free = failure["detected_ms"], failure["unblocked_ms"]
        assert min(seen, free) >= 0 and max(seen, free) <= failure["reformed_ms"] <= failure["resumed_ms"]
        assert run.iterations[-1]["living"] == 5 and run.iterations[-1]["generation"] == 2


def test_two_deaths_in_two_stages_in_one_iteration(reference: Run, tmp_path: Path) -> None:
    run = small(tmp_path / "run.jsonl", "--kill", "W1_0@2:F3", "--kill", "W0_2@2:I2")
    _same_bits(run, reference)
    assert sorted(f["worker"] for f in run.failures) == ["W0_2", "W1_0"]
    assert run.iterations[-1]["living"] == 4


def test_kills_that_do_not_happen_are_said_at_the_end(reference: Run, tmp_path: Path) -> None:
    """Of a worker that is dead by then, and of an op that another worker runs."""
    kills = [part for kill in ("W1_1@2:F1", "W1_1@4:F0", "W0_0@1:F1.2") for part in ("--kill", kill)]
    run = small(tmp_path / "run.jsonl", *kills)
    _same_bits(run, reference)
    assert [line["warning"].split()[0] for line in run.lines if "warning" in line] == ["W1_1@4:F0", "W0_0@1:F1.2"]


@pytest.mark.chaos
def test_a_death_and_a_return(reference: Run, tmp_path: Path) -> None:
    """The newcomer takes its state from a peer, and the full grid goes on to the same bits."""
    run = small(tmp_path / "run.jsonl", "--kill", "W1_1@1:I2", "--rejoin", "W1_1@2", iterations=ITERATIONS)
    _same_bits(run, reference)
    assert [line["living"] for line in run.iterations][:2] == [6, 5]


@pytest.mark.chaos
@pytest.mark.parametrize("technique", ["fault-free", "adaptive", "decoupled"])
def test_the_technique_does_not_show_in_the_numbers(technique: str, reference: Run, tmp_path: Path) -> None:
    _same_bits(small(tmp_path / "run.jsonl", "--technique", technique, "--memory", "1f1b"), reference)


@pytest.mark.chaos
def test_coupled_backward_survives_too(reference: Run, tmp_path: Path) -> None:
    run = small(tmp_path / "run.jsonl", "--technique", "adaptive", "--kill", "W0_1@2:W1")
    _same_bits(run, reference)


@pytest.mark.chaos
def test_another_seed_gives_other_numbers(reference: Run, tmp_path: Path) -> None:
    """The comparison above is not one of constants."""
    run = small(tmp_path / "run.jsonl", "--seed", "1")
    assert run.status == 0
    assert not set(run.losses) & set(reference.losses)
    assert run.final != reference.final
    assert float.fromhex(reference.losses[-1]) < float.fromhex(reference.losses[0])


@pytest.mark.parametrize("kill", ["W0_0@3:O", at_length("W1_1@2:R"), at_length("W1_0@4:I3")])
def test_in_fast_mode_too_a_death_at_the_step_costs_one_worker(kill: str, tmp_path: Path) -> None:
    """The last stage has stepped, the others have not: done again, its sums go another way."""
    run = small(tmp_path / "run.jsonl", "--mode", "fast", "--kill", kill)
    assert run.status == 0, run.errors
    assert [line["iteration"] for line in run.iterations] == list(range(ITERATIONS))
    assert [failure["worker"] for failure in run.failures] == [kill[:4]]
