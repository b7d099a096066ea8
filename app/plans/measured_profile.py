"""The profile that a running job measures by the way: its workers' op times, stage by stage."""

from __future__ import annotations

from statistics import median

from openrecycle.agent.messages.protocol import OpKind
from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.planner.jobs.profile import StageProfile
from openrecycle.planner.layers.migration import SECONDS
from openrecycle.planner.plans.plan import JobDoc, LayerDoc, StageDoc, job_doc

KINDS: tuple[OpKind, ...] = ("F", "I", "W", "B")
OPS = ("forward", "input_backward", "weight_backward")


def measured_profile(job: LiveJob) -> JobDoc | None:
    """The job with the medians of its peers' F, I and W, in ms, in the place of those it was planned with.

    A B that is run whole is split as the job's own profile splits it. The rest is the profile's: bytes, transfers
    and the step, which waits for others, so that its reported time is no measure of it; where the profile is in no
    unit of time, transfers and steps are 0. None: not every stage has reported its ops yet.
    """
    if job.nominal.layers:
        return _by_layer(job)
    planned = job_doc(job.nominal)
    scale = 1000 * SECONDS.get(planned.time_unit, 0.0)  # ms per unit
    stages = []
    for stage, profile in enumerate(planned.profiles):
        took = _medians(job, stage)
        backward = _backward(took, profile)
        if "F" not in took or backward is None:
            return None
        changes = {
            "forward": took["F"],
            "input_backward": backward[0],
            "weight_backward": backward[1],
            "optimizer": scale * profile.optimizer,
            "reductions": tuple(scale * r for r in profile.reductions),
        }
        stages.append(profile.model_copy(update=changes))
    changed = {
        "profiles": tuple(stages),
        "time_unit": "ms",
        "transfers": tuple(scale * t for t in planned.transfers),
        "backward_transfers": tuple(scale * t for t in planned.backward_transfers),
        "speeds": {},
    }
    return planned.model_copy(update=changed)


def _by_layer(job: LiveJob) -> JobDoc | None:
    """A stage's measured times fall to its layers as the planned ones do, or evenly where those are zero."""
    planned, nominal = job_doc(job.nominal), job.nominal
    scale = 1000 * SECONDS.get(planned.time_unit, 0.0)
    layers, at = list[LayerDoc](), 0
    for stage, count in enumerate(nominal.partition):
        whole, members = nominal.profiles[stage], planned.layers[at : at + count]
        at += count
        took = _medians(job, stage)
        backward = _backward(took, whole)
        if "F" not in took or backward is None:
            return None
        for layer in members:
            shares = {
                name: round(time * getattr(layer, name) / of if (of := getattr(whole, name)) else time / count, 3)
                for name, time in zip(OPS, (took["F"], *backward), strict=True)
            }
            back = layer.backward_transfer
            rest = {
                "optimizer": scale * layer.optimizer,
                "reductions": tuple(scale * r for r in layer.reductions),
                "transfer": scale * layer.transfer,
                "backward_transfer": None if back is None else scale * back,
            }
            layers.append(layer.model_copy(update=shares | rest))
    derived = {"profiles": (), "transfers": (), "backward_transfers": ()}
    made = planned.model_copy(update=derived | {"layers": tuple(layers), "time_unit": "ms", "speeds": {}})
    return job_doc(made.job())


def _medians(job: LiveJob, stage: int) -> dict[OpKind, float]:
    """Milliseconds, to the microsecond, of the kinds that a peer of the stage has reported."""
    reports = [job.op_times.smoothed(f"W{p}_{stage}") for p in range(job.nominal.pipelines)]
    known = {kind: [report[kind] for report in reports if kind in report] for kind in KINDS}
    return {kind: round(median(values), 3) for kind, values in known.items() if values}


def _backward(took: dict[OpKind, float], planned: StageDoc | StageProfile) -> tuple[float, float] | None:
    """I and W; None where they are not known."""
    if "I" in took or "W" in took:
        return took.get("I", 0.0), took.get("W", 0.0)
    if "B" not in took:
        return None
    whole = planned.input_backward + planned.weight_backward
    share = planned.input_backward / whole if whole else 0.5
    return round(share * took["B"], 3), round((1 - share) * took["B"], 3)
