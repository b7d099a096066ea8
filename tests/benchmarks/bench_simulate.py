"""Prints the simulator's figures: speed, and what comes out against what was published.

    python -m tests.benchmarks.bench_simulate

Figures that are published stand in brackets.
"""

from __future__ import annotations

import time
from pathlib import Path

import openrecycle.planner.simulation
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique
from openrecycle.planner.plans.plan import JobDoc
from openrecycle.planner.profiles import SHAPES, analytic_job
from openrecycle.planner.simulation.engine import RecoveryCosts, simulate
from openrecycle.planner.simulation.planned import PlannedJob
from openrecycle.planner.simulation.policies import READY_AFTER, planned_policy, published
from openrecycle.planner.simulation.traces import Domain, generated, read_trace
from tests.benchmarks.machine import describe
from tests.planner.problems import periodic

DATA = Path(openrecycle.planner.simulation.__file__).parent / "data"
SINGLE = ("recycle", "oobleck", "repartition", "drop-replica", "checkpoint-restart", "varuna", "bamboo")

TABLE_2 = {
    ("bamboo", "bert-large"): "77.04/75.60/69.84",
    ("bamboo", "gpt-2"): "17.47/17.13/16.01",
    ("varuna", "bert-large"): "259.57/245.39/168.15",
    ("varuna", "gpt-2"): "86.42/83.94/69.67",
    ("varuna", "gpt-3-medium"): "29.52/27.61/20.71",
    ("varuna", "gpt-3-2.7b"): "7.27/6.41/0.36",
    ("varuna", "gpt-3-6.7b"): "4.02/2.91/0.12",
    ("oobleck", "bert-large"): "287.10/286.28/282.11",
    ("oobleck", "gpt-2"): "85.59/85.42/84.80",
    ("oobleck", "gpt-3-medium"): "29.30/29.21/28.70",
    ("oobleck", "gpt-3-2.7b"): "7.29/7.23/6.89",
    ("oobleck", "gpt-3-6.7b"): "4.33/4.22/3.55",
}
TABLE_1 = {
    ("oobleck", "gpt-3-medium"): "27.26/25.37/19.47",
    ("oobleck", "gpt-3-3.35b"): "14.55/13.44/9.78",
    ("oobleck", "gpt-3-6.7b"): "4.98/4.65/2.78",
    ("recycle", "gpt-3-medium"): "27.27/25.42/22.27",
    ("recycle", "gpt-3-3.35b"): "14.59/14.17/12.63",
    ("recycle", "gpt-3-6.7b"): "5.17/4.85/3.53",
}
BY_COUNT = {
    "larger": "11.34/11.29/10.89/10.68/10.47/9.49/9.31/9.13/8.90/8.85",
    "350m": "20.43/20.34/19.36/19.12/18.36/17.09/16.77/16.43/16.01/15.92",
}


def beside(made: list[float], cells: str) -> str:
    """Each figure with the published one and the difference."""
    values = list(map(float, cells.split("/")))
    return "  ".join(f"{a:.2f} ({b:g}, {a / b - 1:+.1%})" for a, b in zip(made, values, strict=True))


def speed() -> None:
    print("54 days of a 16,384-worker job, 1,024 pipelines x 16 stages, an interruption every 2.8 h")
    trace = generated(16_384, 54 * 24, [Domain(1, 16_384 * 54 * 24 / 466, 2.0)], seed=1)
    job = analytic_job(SHAPES["gpt-145.6b"], 1024, 16, 8)
    for name in (*SINGLE, "ours"):
        begin, used = time.perf_counter(), time.process_time()
        planned = PlannedJob(job, samples=8192)
        outcome = simulate(trace, planned_policy(name, planned, RecoveryCosts()))
        wall, cpu = time.perf_counter() - begin, time.process_time() - used
        print(
            f"{name:20s} {wall:5.2f} s ({cpu:.2f} s CPU) with its planning; {outcome.failures} failures, "
            f"{outcome.iterations:,} iterations, ETTR {outcome.ettr:.1%}, goodput {outcome.goodput:.1%}"
        )


def tables() -> None:
    folder = DATA / "oobleck"
    inputs = folder / "throughput-by-node-count.csv", folder / "cost-constants.csv"
    traces = [read_trace(folder / f"{name}.csv") for name in ("6h", "1h", "10m")]
    print("\nOobleck's Table 2, samples/s with a loss every 6 h, 1 h, 10 min")
    for (system, model), cells in TABLE_2.items():
        made = [simulate(t, published(system, *inputs, model), ready_after=READY_AFTER) for t in traces]
        print(f"{system:8s} {model:13s}", beside([o.average_samples_per_second for o in made], cells))
    for model in ("bert-large", "gpt-2"):
        made = [simulate(t, published("bamboo-corrected", *inputs, model), ready_after=READY_AFTER) for t in traces]
        rates = "  ".join(f"{o.average_samples_per_second:.2f}" for o in made)
        print(f"bamboo without the standby nodes' slow-down, {model}: {rates}")
    folder = DATA / "recycle"
    inputs = folder / "throughput-by-gpu-count.csv", folder / "cost-constants.csv"
    print("\nReCycle's Table 1, samples/s with a failure every 6 h, 2 h, 30 min")
    for (system, model), cells in TABLE_1.items():
        made = [simulate(periodic(24, h, 100), published(system, *inputs, model)) for h in (6, 2, 0.5)]
        print(f"{system:8s} {model:13s}", beside([o.average_samples_per_second for o in made], cells))


def by_count() -> None:
    print("\nReCycle's throughput at 24, 23, ... 15 GPUs, from our planner's plans and a fitted profile")
    trace = read_trace(DATA / "recycle" / "gcp-6h.txt")
    costs = RecoveryCosts(detect=0, recover=0.1, rejoin=0, migrate=0)
    for name, average in (("larger", "10.80"), ("350m", "19.37")):
        job = JobDoc.model_validate_json((DATA / "recycle" / f"grid-6x4-{name}.json").read_bytes()).job()
        planned = PlannedJob(job, samples=240, technique=Technique.DECOUPLED, memory=MemoryLimit("none"))
        rates = [rate.per_second for rate in map(planned.rerouted, range(10)) if rate]
        print(f"{name:8s}", beside(rates, BY_COUNT[name]))
        outcome = simulate(trace, planned_policy("recycle", planned, costs))
        print(f"{'':8s} average over its trace:", beside([outcome.average_samples_per_second], average))


def ours() -> None:
    print("\nours against the best single policy, 6 pipelines x 4 stages x 12 micro-batches, on the public traces")
    times = {"F": 0.5, "I": 0.5, "W": 0.5, "O": 0.5, "transfer": 0.02}
    planned = PlannedJob(Job.uniform(6, 4, 12, durations=times), samples=240, memory=MemoryLimit("8"))
    tables = ("throughput", "cost", "restart")
    for path in sorted(DATA.rglob("*")):
        if path.suffix not in (".csv", ".txt") or path.name.startswith(tables):
            continue
        trace = read_trace(path)
        rates = {
            name: simulate(trace, planned_policy(name, planned, RecoveryCosts())).trace_samples_per_second
            for name in (*SINGLE, "ours")
        }
        best = max(SINGLE, key=lambda name: rates[name])
        print(
            f"{path.name[:44]:44s} {rates['ours']:6.2f} samples/s, x{rates['ours'] / rates[best]:.4f} of {best}, "
            f"x{rates['ours'] / rates['recycle']:.3f} of recycle"
        )


def main() -> None:
    print(describe())
    speed()
    tables()
    by_count()
    ours()


if __name__ == "__main__":
    main()
