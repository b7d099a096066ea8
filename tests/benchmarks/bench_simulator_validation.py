"""Does the simulator foretell what a real job does? 12 paced workers under a scripted failure trace.

    python -m tests.benchmarks.bench_simulator_validation [--minutes 10]

The trace has 12 membership changes at 10 times, by the clock: deaths by SIGKILL (among them a stage's
second-last worker, and two at once) and returns, stretched to the minutes asked for. The prediction
is `planner.simulation` with the ReCycle policy: the planner's periods for the same job, technique and
memory limit, and what detection, recovery and returns cost. These costs come from a run before, in
which other workers die and return; nothing of the run that is predicted enters the prediction.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit
from openrecycle.planner.simulation.engine import SECOND, RecoveryCosts, SimulationOutcome, simulate
from openrecycle.planner.simulation.planned import PlannedJob
from openrecycle.planner.simulation.policies import ReCycle
from openrecycle.planner.simulation.traces import Event, Trace
from tests.benchmarks.machine import describe
from tests.benchmarks.scripted_job import TINY, Pause, ScriptedRun, Step, TooBusyError, run_script

PIPELINES, STAGES, MICRO_BATCHES = 3, 4, 6
OPS = {"F": 40.0, "I": 40.0, "W": 40.0, "O": 20.0}
GOAL = 0.03
DRAWS = 200
SAMPLES = PIPELINES * MICRO_BATCHES * TINY["batch"]

# (share of the run, deaths, returns); at .13 one worker of stage 2 is left, at .57 two die at once.
SCRIPT: tuple[tuple[float, tuple[str, ...], tuple[str, ...]], ...] = (
    (0.05, ("W1_2",), ()),
    (0.13, ("W0_2",), ()),
    (0.22, (), ("W1_2",)),
    (0.31, (), ("W0_2",)),
    (0.40, ("W2_0",), ()),
    (0.48, (), ("W2_0",)),
    (0.57, ("W0_1", "W2_3"), ()),
    (0.65, (), ("W0_1",)),
    (0.75, ("W1_0",), ()),
    (0.83, (), ("W2_3", "W1_0")),
)
# Other workers, one by one: seconds. On stage 1 a first loss costs least, and nobody moves for it.
CALIBRATION = (
    Step(3, kills=("W0_3",)),
    Step(8, kills=("W1_3",)),
    Step(13, returns=("W0_3",)),
    Step(19, returns=("W1_3",)),
    Step(25, kills=("W2_1",)),
    Step(30, kills=("W0_0",)),
    Step(35, returns=("W2_1",)),
    Step(41, returns=("W0_0",)),
    Step(47, kills=("W1_1",)),
    Step(52, returns=("W1_1",)),
)
CALIBRATION_SECONDS = 58.0


@dataclass(frozen=True)
class Calibration:
    """ready_after: seconds from a worker's return until it can join."""

    costs: RecoveryCosts
    ready_after: float

    def of(self, pause: Pause, planned: PlannedJob) -> float:
        """Seconds that the simulator takes this step to cost."""
        if pause.step.returns:
            return self.costs.rejoin
        moved = self.costs.migrate if planned.moves(pause.failed) else 0.0
        return self.costs.detect + self.costs.recover + moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="of the run that is predicted (default: 1)")
    parser.add_argument("--memory", default="uniform", help="limit of the plans (default: uniform)")
    arguments = parser.parse_args()
    if not 1 <= arguments.minutes <= 600:
        parser.error(f"--minutes: got {arguments.minutes:g}, expected 1 to 600")
    try:
        memory = MemoryLimit.parse(arguments.memory)
    except InputError as error:
        parser.error(str(error))
    print(describe())
    try:
        validate(memory, 60 * arguments.minutes)
    except TooBusyError as error:
        print(f"nothing to compare: {error}")
    print(describe())


def validate(memory: MemoryLimit, seconds: float) -> None:
    """Calibrates, predicts, runs and compares. Raises TooBusyError."""
    job = Job.uniform(PIPELINES, STAGES, MICRO_BATCHES, durations=OPS, time_unit="ms")
    planned = PlannedJob(job, samples=SAMPLES, memory=memory)
    pace = ",".join(f"{kind}={ms:g}ms" for kind, ms in OPS.items())
    told = ", ".join(f"{kind} {ms:g} ms" for kind, ms in OPS.items())
    print(f"the plan knows of {told} and takes transfers, of 4 KiB, for nothing; memory limit {memory.text}")
    calibration = calibrate(run_script(job, memory, pace, CALIBRATION, CALIBRATION_SECONDS))
    costs = calibration.costs
    print(
        f"calibrated: detect {1000 * costs.detect:.0f} ms, recover {1000 * costs.recover:.0f} ms, a loss that "
        f"moves a worker {1000 * costs.migrate:.0f} ms more, a return {1000 * costs.rejoin:.0f} ms, "
        f"{calibration.ready_after:.1f} s after it is wished for"
    )
    script = [Step(round(share * seconds, 3), kills, returns) for share, kills, returns in SCRIPT]
    run = run_script(job, memory, pace, script, seconds)
    report(planned, calibration, script, run, seconds)


def calibrate(run: ScriptedRun) -> Calibration:
    """Medians of what a loss for which nobody moves, one for which somebody does, and a return cost."""
    pauses = run.pauses()
    returns = [p for p in pauses if p.step.returns]
    detect = statistics.median(run.detected)
    stayed = statistics.median(p.lost for p in pauses if p.step.kills and not p.moved)
    went = [p.lost for p in pauses if p.step.kills and p.moved]
    half = statistics.mean(c.seconds for c in run.steady()) / 2
    # The simulator's worker waits for the end of the iteration in flight, half of one on average.
    ready_after = statistics.median(p.delay for p in returns) - half
    return Calibration(
        RecoveryCosts(
            detect=detect,
            recover=max(0.0, stayed - detect),
            migrate=max(0.0, statistics.median(went) - stayed) if went else 0.0,
            rejoin=max(0.0, statistics.median(p.lost for p in returns)),
        ),
        max(0.0, ready_after),
    )


def predict(planned: PlannedJob, calibration: Calibration, script: Sequence[Step], until: float) -> SimulationOutcome:
    """The simulator's run of the script's first `until` seconds, which count from when training began."""
    start = round(1000 * calibration.ready_after)
    events = [Event(0, "add", str(worker)) for worker in planned.job.workers()]
    for step in script:
        if step.at < until:
            at = start + round(1000 * step.at)
            events += [Event(at, "remove", name) for name in step.kills]
            events += [Event(at, "add", name) for name in step.returns]
    trace = Trace.of("script", events, end=start + round(1000 * until))
    return simulate(trace, ReCycle(planned, calibration.costs), ready_after=start * SECOND // 1000)


def report(
    planned: PlannedJob, calibration: Calibration, script: Sequence[Step], run: ScriptedRun, seconds: float
) -> None:
    late = max(at - step.at for at, step in zip(run.issued, script, strict=True))
    changes = sum(len(step.kills) + len(step.returns) for step in script)
    print(f"{seconds / 60:g} minutes, {changes} membership changes, the latest {1000 * late:.0f} ms after its time:")
    failed = predicted = real = 0
    for n, (begin, end) in enumerate(pairwise([0.0, *(step.at for step in script), seconds])):
        forecast = predict(planned, calibration, script, end).iterations - predicted
        done = sum(c.at <= end for c in run.commits[1:]) - real
        print(
            f"  {begin:6.1f} to {end:6.1f} s, {failed} failed: predicted {forecast:4d}, real {done:4d} iterations"
            f"{_steady(planned, run, begin, end, failed)}"
        )
        predicted, real = predicted + forecast, real + done
        if n < len(script):
            failed += len(script[n].kills) - len(script[n].returns)
    error = predicted / real - 1
    print(
        f"predicted {predicted} iterations ({predicted * SAMPLES} samples, {predicted * SAMPLES / seconds:.2f} "
        f"samples/s), real {real} ({real * SAMPLES}, {real * SAMPLES / seconds:.2f}): "
        f"error {error:+.1%} (goal {GOAL:.0%}: {'met' if abs(error) <= GOAL else 'missed'})"
    )
    mean, spread = _by_chance(planned, calibration, script, seconds)
    print(
        f"with each change up to half an iteration earlier or later: predicted {mean:.1f}, standard deviation "
        f"{spread:.1f}; error {mean / real - 1:+.1%}"
    )
    _explain(planned, calibration, run, mean / real - 1, seconds)


def _by_chance(
    planned: PlannedJob, calibration: Calibration, script: Sequence[Step], seconds: float
) -> tuple[float, float]:
    """Mean and standard deviation of the predicted iterations over where in an iteration the changes
    fall: how much of a death's iteration is lost is chance, here as in the real job."""
    half, rng, counts = _simulated(planned, 1) / 2000, random.Random(0), []
    for _ in range(DRAWS):
        moved = [replace(step, at=step.at + rng.uniform(-half, half)) for step in script]
        counts.append(predict(planned, calibration, moved, seconds).iterations)
    return statistics.mean(counts), statistics.stdev(counts)


def _steady(planned: PlannedJob, run: ScriptedRun, begin: float, end: float, failed: int) -> str:
    """The real period between the changes, beside that of the plan in force and the simulator's."""
    calm = [c for c in run.steady() if begin + c.seconds < c.at <= end and run.failed(c) == failed]
    if not calm:
        return ""
    mean = 1000 * statistics.mean(c.seconds for c in calm)
    plan = run.generations[calm[-1].generation].planned
    return f"; period {mean:.0f} ms, {plan:.0f} planned, {_simulated(planned, failed):.0f} simulated"


def _explain(planned: PlannedJob, calibration: Calibration, run: ScriptedRun, error: float, seconds: float) -> None:
    """What the real run lost, as shares of its time, that the prediction had not counted on."""
    steady = run.steady()
    plans = sum(run.generations[c.generation].planned - _simulated(planned, run.failed(c)) for c in steady) / 1000
    ops = sum(c.seconds - run.generations[c.generation].planned / 1000 for c in steady)
    pauses = run.pauses()
    stopped = sum(p.lost - calibration.of(p, planned) for p in pauses)
    known = plans + ops + stopped
    print("of the latter error,")
    for share, what in (
        (plans, "plans in force that are longer than the simulator's of as many failures"),
        (ops, "iterations longer than their plan"),
        (stopped, f"pauses longer than calibrated ({sum(p.lost for p in pauses):.1f} s in all)"),
        (error * seconds - known, "the rest: what was in flight at changes and the end, returns sooner or later"),
    ):
        print(f"  {share / seconds:+.1%} {what}")


def _simulated(planned: PlannedJob, failed: int) -> float:
    """Milliseconds of the period that the simulator goes by."""
    rate = planned.rerouted(failed)
    assert rate is not None
    return 1000 * rate.seconds


if __name__ == "__main__":
    main()
