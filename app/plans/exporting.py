"""A plan as a file: which formats there are for it, why one is refused, and the file itself."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.plans.bundle import CatalogPart, catalog_part, make_bundle
from openrecycle.app.runtime.children import Channel, ChildEnded, Children
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.export import EXPORTERS, yaml_document
from openrecycle.planner.export.picture import MAX_ROWS, MAX_STAGES
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.plan import MEASURED, Plan

BUNDLE, BUNDLE_TYPE = "bundle", "application/zip"
MAX_OPS = 2_000_000
# Above this a file takes so long that the console's own work would wait for it: a child makes it.
OPS_HERE = 20_000
CHILD_SECONDS = 120.0

Code = Literal["too_large", "not_in_this_format"]


@dataclass(frozen=True)
class Refusal:
    """reason: a sentence that says what would do."""

    code: Code
    reason: str

    @property
    def error(self) -> ConsoleError:
        return ConsoleError(413 if self.code == "too_large" else 422, self.code, self.reason)


@dataclass(frozen=True)
class ExportOffer:
    """One format of one plan. pipeline: the one that the file holds, where it can't hold all."""

    name: str
    title: str
    media_type: str
    file_name: str
    pipeline: int | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Export:
    """What is exported. name: how people call the plan.

    spec, catalog, job_id: of the job that it belongs to, if it does; the catalog is called for by the bundle alone.
    """

    plan: Plan
    name: str
    spec: JobSpec | None = None
    catalog: Callable[[], Catalog] | None = None
    job_id: str | None = None


def offers(plan: Plan, name: str, job_id: str | None = None) -> list[ExportOffer]:
    """Every format, those that are refused for this plan too. job_id: of the job that the plan belongs to."""
    stem = file_stem(plan, name, job_id)
    out = []
    for entry in EXPORTERS.values():
        # torch's CSV has one line per stage, so it holds one pipeline.
        pipeline = 0 if entry.name == "torch-csv" else None
        title = entry.title + (", pipeline 0" if pipeline == 0 and plan.job.pipelines > 1 else "")
        refusal = _refusal(plan, entry.name)
        out.append(ExportOffer(entry.name, title, entry.media_type, stem + entry.suffix, pipeline, refusal))
    bundle = ExportOffer(BUNDLE, "Job bundle (zip)", BUNDLE_TYPE, stem + ".zip", refusal=_refusal(plan, BUNDLE))
    return [*out, bundle]


def offer_named(plan: Plan, name: str, wanted: str, job_id: str | None = None) -> ExportOffer:
    """Raises ConsoleError (422) for a format that there is none of."""
    found = {offer.name: offer for offer in offers(plan, name, job_id)}
    if wanted not in found:
        raise ConsoleError(422, "invalid", f"format: got {wanted!r}, expected one of {', '.join(found)}")
    return found[wanted]


def render(export: Export, offer: ExportOffer, pipeline: int | None = None) -> bytes:
    """The file. pipeline: another one than the offer's. Raises ConsoleError (413, 422, 503).

    Blocks; a large plan's file is made in a child process.
    """
    if offer.refusal is not None:
        raise offer.refusal.error
    pipeline = offer.pipeline if pipeline is None else pipeline
    if export.plan.op_count <= OPS_HERE:
        return _made(export.plan, export.name, export.spec, _part(export, offer.name), offer.name, pipeline)
    return _in_child(export, offer.name, pipeline)


def file_stem(plan: Plan, name: str, job_id: str | None = None, at: float | None = None) -> str:
    """`demo-6f1c2a-3x4x6-without-W1_2-staggered-1a2b3c4d-2026-11-22`: the job and the plan, and the day (UTC).

    Of the name what comes before a colon or what the rest of the file's name says too. at: POSIX seconds (default:
    now).
    """
    called = re.split(r":|,? *without |, memory ", name)[0]
    words = re.sub(r"[^0-9A-Za-z._]+", "-", called).strip("-.")[:40].strip("-.")
    job = plan.job
    lost = "-".join(plan.failed) if len(plan.failed) <= 3 else f"{len(plan.failed)}-workers"
    parts = [words or "plan", *([job_id[:8]] if job_id else [])]
    parts += [f"{job.pipelines}x{job.stages}x{job.micro_batches}"]
    parts += [f"without-{lost}"] if plan.failed else []
    parts += [plan.technique.value, plan.fingerprint[:8], time.strftime("%Y-%m-%d", time.gmtime(at))]
    return "-".join(parts)


def _refusal(plan: Plan, name: str) -> Refusal | None:
    ops = plan.op_count
    if ops > MAX_OPS:
        return Refusal("too_large", f"the plan has {ops:,} ops and the console exports at most {MAX_OPS:,}")
    if name == "yaml" and ops > yaml_document.MAX_OPS:
        most = yaml_document.MAX_OPS
        return Refusal("too_large", f"the plan has {ops:,} ops and YAML is written for at most {most:,}; use JSON")
    if name in ("svg", "png") and _rows(plan) > MAX_ROWS and plan.job.stages > MAX_STAGES:
        return Refusal("too_large", f"the plan has {plan.job.stages:,} stages and a picture at most {MAX_STAGES}")
    if name == BUNDLE and plan.solver.name == MEASURED:
        why = "this is an iteration as it ran, which no job can be started with; take the plan that it ran"
        return Refusal("not_in_this_format", why)
    if name == "torch-csv" and (plan.failed or _reroutes(plan)):
        why = (
            "torch.distributed.pipelining runs each stage on one rank, so a plan that re-routes can't be written in it"
        )
        return Refusal("not_in_this_format", why)
    return None


def _rows(plan: Plan) -> int:
    return plan.job.pipelines * plan.job.stages - len(plan.failed)


def _reroutes(plan: Plan) -> bool:
    return any(plan.rerouted().values())


def _part(export: Export, name: str) -> CatalogPart:
    if name != BUNDLE:
        return CatalogPart("", "")
    return catalog_part(export.catalog() if export.catalog else None)


def _made(
    plan: Plan, called: str, spec: JobSpec | None, catalog: CatalogPart, name: str, pipeline: int | None
) -> bytes:
    try:
        if name == BUNDLE:
            return make_bundle(plan, called, spec, catalog)
        return EXPORTERS[name].render(plan, pipeline=pipeline)
    except PlannerError as error:
        raise ConsoleError(422, "not_in_this_format", str(error).replace("--", "")) from None


def _in_child(export: Export, name: str, pipeline: int | None) -> bytes:
    spec = export.spec.model_dump_json() if export.spec else ""
    document, catalog = export.plan.to_json(), _part(export, name)
    try:
        said = _CHILDREN.ask(
            document, export.name, spec, catalog, name, pipeline, timeout=CHILD_SECONDS, wait=CHILD_SECONDS
        )
    except TimeoutError:
        raise ConsoleError(503, "unavailable", "other exports are being made; try again in a minute") from None
    except ChildEnded as ended:
        if ended.late:
            late = f"the file was not done after {CHILD_SECONDS:.0f} s; use the CLI"
            raise ConsoleError(413, "too_large", late) from None
        raise ConsoleError(503, "unavailable", "the export was ended before it was done") from None
    if said[:1] == _REFUSED:
        raise ConsoleError(422, "not_in_this_format", said[1:].decode())
    return said[1:]


def make_file(
    channel: Channel, document: str, called: str, spec: str, catalog: CatalogPart, name: str, pipeline: int | None
) -> None:
    """In a child: the file, or a sentence."""
    try:
        parsed = JobSpec.model_validate_json(spec) if spec else None
        channel.say(_MADE + _made(Plan.from_json(document), called, parsed, catalog, name, pipeline))
    except ConsoleError as error:
        channel.say(_REFUSED + error.detail.encode())


_MADE, _REFUSED = b"+", b"-"
_CHILDREN = Children(make_file, name="export", most=2)
