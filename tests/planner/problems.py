"""Random small planning problems for property tests, and failures at even intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from openrecycle.planner.jobs.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker
from openrecycle.planner.simulation.traces import HOUR_MS, Event, Trace
from openrecycle.planner.solvers.routing import assign

DURATIONS = (0.0, 0.5, 1.0, 1.25, 2.0, 3.0)
REROUTING = (Technique.ADAPTIVE, Technique.DECOUPLED, Technique.STAGGERED)
MEMORIES = ("1f1b", "uniform", "none", "1", "2", "3")
SPEEDS = (0.5, 0.75, 0.9, 1.5)


def route(problem: Problem) -> dict[tuple[int, int, int], int]:
    """(stage, pipeline, micro_batch) -> pipeline of the worker that runs it."""
    count = problem.job.micro_batches
    return {
        (stage, *divmod(index, count)): worker
        for stage, row in enumerate(assign(problem))
        for index, worker in enumerate(row)
    }


@st.composite
def jobs(
    draw: st.DrawFn,
    *,
    pipelines: int = 4,
    stages: int = 4,
    micro_batches: int = 6,
    unlike: bool = True,
    speeds: bool = True,
) -> Job:
    """A grid with uneven stages, zero-length I, W, O and transfers among them.

    unlike: also with gradients that take another time than activations, reductions by group size,
    and bytes, of which at least one micro-batch fits. speeds: also with slow and fast workers.
    """
    n_stages, n_pipelines = draw(st.integers(1, stages)), draw(st.integers(1, pipelines))
    duration = st.sampled_from(DURATIONS)
    unlike = unlike and draw(st.booleans())
    speeds = speeds and draw(st.booleans())

    def profile() -> StageProfile:
        i, w = draw(st.tuples(duration, duration).filter(lambda t: sum(t) > 0))
        plain = StageProfile(draw(st.sampled_from(DURATIONS[1:])), i, w, draw(duration))
        if not unlike:
            return plain
        by_peers = tuple(draw(duration) for _ in range(n_pipelines)) if draw(st.booleans()) else ()
        activation, kept, weights, state = (draw(st.integers(0, 9)) for _ in range(4))
        return replace(
            plain,
            reductions=by_peers,
            activation_bytes=activation,
            weight_backward_bytes=kept,
            weight_bytes=weights,
            optimizer_bytes=state,
        )

    def wires() -> tuple[float, ...]:
        return tuple(draw(st.sampled_from((0.0, 0.0, 0.25, 1.0))) for _ in range(n_stages - 1))

    even = draw(st.booleans())
    profiles = (profile(),) * n_stages if even else tuple(profile() for _ in range(n_stages))
    places = [Worker(p, s) for p in range(n_pipelines) for s in range(n_stages)]
    own = draw(st.dictionaries(st.sampled_from(places), st.sampled_from(SPEEDS), max_size=4)) if speeds else {}
    return Job(
        n_pipelines,
        n_stages,
        draw(st.integers(1, micro_batches)),
        profiles=profiles,
        transfers=wires(),
        backward_transfers=wires() if unlike else (),
        capacity_bytes=tuple(36 + draw(st.integers(0, 20)) for _ in range(n_stages)) if unlike else (),
        speeds=tuple(own.items()),
    )


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    techniques: Sequence[Technique] = REROUTING,
    memories: Sequence[str] = MEMORIES,
    pipelines: int = 4,
    stages: int = 4,
    micro_batches: int = 6,
    unlike: bool = True,
    speeds: bool = True,
) -> Problem:
    """A job with any survivable failures, a technique and a memory limit."""
    job = draw(jobs(pipelines=pipelines, stages=stages, micro_batches=micro_batches, unlike=unlike, speeds=speeds))
    if job.capacity_bytes and len(memories) > 2:
        memories = (*memories, "bytes")
    technique = draw(st.sampled_from(list(techniques)))
    failed: frozenset[Worker] = frozenset()
    if technique.reroutes:
        failed = frozenset(
            Worker(p, s)
            for s in range(job.stages)
            for p in draw(st.sets(st.integers(0, job.pipelines - 1), max_size=job.pipelines - 1))
        )
    return Problem(job, failed, technique, MemoryLimit(draw(st.sampled_from(list(memories)))))


def periodic(workers: int, every: float, failures: int, *, name: str = "periodic") -> Trace:
    """One worker is lost in the middle of every interval of `every` hours, and replaced at once."""
    step = round(every * HOUR_MS)
    events = [Event(0, "add", f"node{w}") for w in range(workers)]
    for i in range(failures):
        time = i * step + step // 2
        events += [Event(time, "remove", f"node{i % workers}"), Event(time, "add", f"node{i % workers}")]
    return Trace.of(name, events, end=failures * step)
