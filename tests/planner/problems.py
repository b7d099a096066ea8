"""Random small planning problems for property tests."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from planner.job import Job, MemoryLimit, Problem, StageProfile, Technique, Worker

DURATIONS = (0.0, 0.5, 1.0, 1.25, 2.0, 3.0)
REROUTING = (Technique.ADAPTIVE, Technique.DECOUPLED, Technique.STAGGERED)
MEMORIES = ("1f1b", "uniform", "none", "1", "2", "3")


@st.composite
def jobs(draw: st.DrawFn, *, pipelines: int = 4, stages: int = 4, micro_batches: int = 6) -> Job:
    """A grid with uneven stages, zero-length I, W, O and transfers among them."""
    n_stages = draw(st.integers(1, stages))
    duration = st.sampled_from(DURATIONS)

    def profile() -> StageProfile:
        i, w = draw(st.tuples(duration, duration).filter(lambda t: sum(t) > 0))
        return StageProfile(draw(st.sampled_from(DURATIONS[1:])), i, w, draw(duration))

    even = draw(st.booleans())
    profiles = (profile(),) * n_stages if even else tuple(profile() for _ in range(n_stages))
    return Job(
        draw(st.integers(1, pipelines)),
        n_stages,
        draw(st.integers(1, micro_batches)),
        profiles=profiles,
        transfers=tuple(draw(st.sampled_from((0.0, 0.0, 0.25, 1.0))) for _ in range(n_stages - 1)),
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
) -> Problem:
    """A job with any survivable failures, a technique and a memory limit."""
    job = draw(jobs(pipelines=pipelines, stages=stages, micro_batches=micro_batches))
    technique = draw(st.sampled_from(list(techniques)))
    failed: frozenset[Worker] = frozenset()
    if technique.reroutes:
        failed = frozenset(
            Worker(p, s)
            for s in range(job.stages)
            for p in draw(st.sets(st.integers(0, job.pipelines - 1), max_size=job.pipelines - 1))
        )
    return Problem(job, failed, technique, MemoryLimit(draw(st.sampled_from(list(memories)))))
