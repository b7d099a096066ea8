"""Plans as files: uploads (`Uploads`) and exports (`offers`, `render`). Large ones are read and made in child
processes.

Other threads can't run while JSON is parsed and pydantic validates: megabytes of it would delay every heartbeat. So a
child reads an upload, checks it and returns a summary and its bytes. The console never builds the plan, and a document
that was made to take a lot of memory takes it in a process that then ends.

For exports this file says which formats there are for a plan and why one is refused, and makes the file. The bundle is
a zip with all that is needed to read a plan, and to run its job elsewhere.
"""

from __future__ import annotations

import gc
import io
import json
import re
import shlex
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import structlog
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from openrecycle.agent.config.options import BY_PROFILE, GRID, TOLD, differing, words_of
from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.runtime.errors import BODY, ConsoleError, bounded, invalid, malformed
from openrecycle.app.runtime.processes import Channel, Children
from openrecycle.planner.catalogs.catalog import Catalog, CatalogInfo, folder_files
from openrecycle.planner.catalogs.catalog_build import most_failures
from openrecycle.planner.check import check, further
from openrecycle.planner.export import EXPORTERS, text_formats
from openrecycle.planner.jobs.errors import PlannerError, in_words
from openrecycle.planner.jobs.job import Job, MemoryLimit
from openrecycle.planner.plans.packed import CatalogQuestion, packed, unpack
from openrecycle.planner.plans.plan import MEASURED, JobDoc, Plan

# -- large plans that come from outside ---------------------------------------------------------

log = structlog.get_logger()

# How many characters of a file's name become the plan's name.
NAME = 80
# Smaller plans are read in a few milliseconds, in the process that gets them.
LARGE = 128 * 1024
# The end of a JSON error, which says where it is.
_PLACE = re.compile(r"line (\d+) column (\d+) \(char \d+\)$")
# How many uploads, each of megabytes, may wait for the one that is read.
MOST_WAITING = 8
# Limits for the process that reads: 31 MB take some 12 s and 0.7 GB, 128 MB four times that.
TIMEOUT = 300.0
MOST_BYTES = 4 << 30
# Limits for objects and lists, and for fields: eight megabytes of ops have fewer. Larger documents may have one for
# each so many bytes.
MOST_CONTAINERS, MOST_FIELDS = 150_000, 800_000
CONTAINER_BYTES, FIELD_BYTES = 40, 10


def _plan(value: Any) -> Plan | None:
    try:
        return value if value is None or isinstance(value, Plan) else Plan.from_document(value)
    except PlannerError as error:  # it says the field of the plan, which pydantic doesn't know
        raise invalid(error, "plan") from None


class PlanToSave(BaseModel):
    """plan: a whole Plan document, which is checked; or solve: the id of one that was made here."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=200)]
    plan: Annotated[Plan | None, PlainValidator(_plan, json_schema_input_type=Plan | None)] = None
    solve: Annotated[str, Field(max_length=64)] | None = None

    @property
    def wrong(self) -> ConsoleError | None:
        """Why the plan can't be saved; None: it can."""
        if (self.plan is None) == (self.solve is None):
            return ConsoleError(422, "invalid", "expected one of them", field="plan, solve")
        if self.plan is None or not (found := check(self.plan)):
            return None
        said = str(found[0]) + (f"; and {more}" if (more := further(found)) else "")
        return ConsoleError(422, "invalid", said, field="plan")


class ReadPlan(NamedTuple):
    """A plan that was read and checked, in its packed form. summary: see `summary_of`."""

    name: str
    fingerprint: str
    summary: dict[str, object]
    packed: bytes


class Reading:
    """A file that is being read in a thread while a page waits. size: bytes. Once `over`, either `kept` is the
    fingerprint of its plan, or `error` says why there is none."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.began = name, size, time.monotonic()
        self.kept, self.error = "", ""

    @property
    def over(self) -> bool:
        return bool(self.kept or self.error)


class Uploads:
    """Reads uploaded plans, one after the other. One per console. Thread-safe; `read` blocks its caller.

    most_waiting: more than that may not wait while one is read.
    """

    def __init__(self, most_waiting: int = MOST_WAITING) -> None:
        self._children = Children(read_upload, name="upload", most=1, memory=MOST_BYTES)
        self._lock = threading.Lock()
        self._most_waiting, self._waiting = most_waiting, 0

    def read(self, body: bytes) -> ReadPlan | PlanToSave:
        """Reads the body of POST /plans: returns the plan in it, or the id of a solve.

        Raises ConsoleError: 422 if it has no valid plan, 429 if too many wait, and ChildEnded.
        """
        with self._lock:
            if self._waiting > self._most_waiting:
                detail = f"{self._most_waiting} plans wait to be read already; try again later"
                raise ConsoleError(429, "too_many", detail)
            self._waiting += 1
        try:
            head, *document = self._children.ask(body, timeout=TIMEOUT)
        finally:
            with self._lock:
                self._waiting -= 1
        return ReadPlan(**head, packed=document[0]) if document else PlanToSave(**head)

    def begin(self, name: str, document: bytes, keep: Callable[[ReadPlan], str]) -> Reading:
        """Reads the Plan document of a file in a thread of its own, and keeps the plan under the file's name.

        keep: stores the plan and returns its fingerprint; called in that thread.
        """
        reading = Reading(name, len(document))
        called = json.dumps(name.removesuffix(".json")[:NAME].strip() or "plan").encode()
        before = b'{"name":' + called + b',"plan":'

        def read() -> None:
            try:
                found = self.read(before + document + b"}")
                if not isinstance(found, ReadPlan):
                    raise ConsoleError(422, "invalid", "it is not a plan")
                reading.kept = keep(found)
            except ConsoleError as error:
                reading.error = f"{name}: {of_file(error, len(before))}"
            except Exception as error:
                log.exception("an uploaded plan could not be kept")
                reading.error = f"{name}: it could not be kept ({type(error).__name__})"

        threading.Thread(target=read, name="upload", daemon=True).start()
        return reading

    def close(self) -> None:
        """Ends the process that reads."""
        self._children.close()


def of_file(error: ConsoleError, before: int) -> str:
    """Says an error about a body as one about the file in it. before: how many bytes of the body precede the file."""
    said = f"the file: {error.said}" if error.field == BODY else error.detail
    if found := _PLACE.search(said):
        line, column = int(found[1]), int(found[2])
        said = f"{said[: found.start()]}line {line} column {max(1, column - before if line == 1 else column)}"
    return said


def read_upload(channel: Channel, body: bytes) -> None:
    """Reads one upload, in the child."""
    gc.disable()  # rounds would search a million lists again and again, and the process ends soon
    for message in answer(body):
        channel.say(message)


def answer(body: bytes) -> list[bytes | dict[str, Any]]:
    """Returns the fields of a PlanToSave, or those of a ReadPlan and its packed form. Raises ConsoleError."""
    try:
        size = len(body)
        containers, fields = max(MOST_CONTAINERS, size // CONTAINER_BYTES), max(MOST_FIELDS, size // FIELD_BYTES)
        bounded(body, containers=containers, fields=fields)
        message = PlanToSave.model_validate_json(body)
    except ValidationError as error:
        raise malformed(error.errors(include_url=False)) from None  # type: ignore[arg-type]
    if wrong := message.wrong:
        raise wrong
    plan = message.plan
    if plan is None:
        return [{"name": message.name, "solve": message.solve}]
    return [{"name": message.name, "fingerprint": plan.fingerprint, "summary": summary_of(plan)}, packed(plan)]


def summary_of(plan: Plan) -> dict[str, Any]:
    """Returns the summary of a plan that is stored beside it, as plain data."""
    job, metrics = plan.job, plan.metrics
    return {
        "period": metrics.period,
        "lower_bound": metrics.lower_bound,
        "gap": metrics.gap,
        "time_unit": job.time_unit,
        "failed": list(plan.failed),
        "technique": plan.technique.value,
        "memory": plan.memory,
        "pipelines": job.pipelines,
        "stages": job.stages,
        "micro_batches": job.micro_batches,
        "workers": job.pipelines * job.stages,
    }


# -- a plan as a file ---------------------------------------------------------------------------

# A catalog of more ops than this would make the bundle too large to pass around.
CATALOG_OPS = 1_000_000
PICTURE_OPS = 20_000


class CatalogPart(NamedTuple):
    """The catalog in a bundle. files: of its folder, by their path below `catalog`; none: it is left out. about: what
    it has, or why there is none. failures: the most that one of its plans is for."""

    files: dict[str, bytes]
    about: str
    failures: int = 0


def catalog_part(catalog: Catalog | None) -> CatalogPart:
    if catalog is None or not len(catalog):
        return CatalogPart({}, "no plans were made ahead for this job")
    plans = catalog.plans
    size, failures = sum(made.op_count for made in plans), max(len(made.failed) for made in plans)
    if size > CATALOG_OPS:
        return CatalogPart({}, f"{len(plans)} plans with {size:,} ops in all; make it with the line below", failures)
    info = CatalogInfo.of(CatalogQuestion(catalog.job, catalog.technique, catalog.memory))
    about = f"The plans made ahead, {len(plans)} failure patterns; the line below goes on from them."
    return CatalogPart(folder_files(info, catalog.packed()), about, failures)


def make_bundle(plan: Plan, name: str, spec: JobSpec | None, catalog: CatalogPart) -> bytes:
    """Makes a zip of plan.json, profile.json (the job that was planned for), plan.svg, catalog/ and README.md.

    spec, catalog: of the job that the plan belongs to. Large plans come without a picture, and a catalog that is
    missing or too large is left out; the README says so.
    """
    about = {
        "README.md": "This text.",
        "plan.json": "The plan: every op with its worker and its times.",
        "profile.json": "The job that was planned for: grid, op times by stage, transfers, memory.",
    }
    files = {
        "plan.json": (plan.to_json() + "\n").encode(),
        "profile.json": (plan.job.model_dump_json(indent=1) + "\n").encode(),
    }
    left_out = []
    ops = plan.op_count
    if ops <= PICTURE_OPS:
        try:
            files["plan.svg"], about["plan.svg"] = EXPORTERS["svg"].render(plan), "A picture of it."
        except PlannerError as error:
            left_out.append(f"plan.svg: {error}.")
    else:
        left_out.append(f"plan.svg: {ops:,} ops are too many for a picture here.")
    if catalog.files:
        about["catalog/"] = catalog.about
        files |= {f"catalog/{name}": data for name, data in catalog.files.items()}
    else:
        left_out.append(f"catalog/: {catalog.about}.")
    files["README.md"] = _readme(plan, name, spec, about, left_out, catalog.failures).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for file_name, content in sorted(files.items()):
            # A fixed time: equal plans make equal bundles.
            entry = zipfile.ZipInfo(file_name, (2020, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return out.getvalue()


# Said in any case, for whoever changes them.
_SAID = ("planning.technique", "planning.memory", "iterations", "seed", "console.name")


def launch_line(plan: Plan, spec: JobSpec | None) -> str:
    """Returns the command that starts the plan's job, without what a console does not know: its own address, the model,
    and the folder for checkpoints."""
    job, profile = plan.job, list[str]()
    given: dict[str, Any] = {path: getattr(job, path.removeprefix("job.")) for path in GRID}
    given |= {"planning.technique": plan.technique.value, "planning.memory": plan.memory}
    told = {} if spec is None else {path: getattr(spec, field) for field, path in TOLD.items()}
    paced = told.pop("planning.pace", False)
    told.pop("checkpoints.directory", None)
    if told.get("planning.migrate"):
        del told["planning.migrate"]  # with a console it is so by default, where it may be
    if not job.layers:
        told.pop("planning.relayout", None)
    given |= {path: told[path] for path in _SAID if path in told} | differing(told)
    if spec is not None and paced and spec.durations:
        given["planning.pace"] = ",".join(f"{kind}={ms:g}ms" for kind, ms in spec.durations.items() if ms)
    elif not _slots(job):
        profile = ["--profile", "profile.json"]
        given |= {"planning.pace": BY_PROFILE} if paced else {}
    return shlex.join(["openrecycle", "train", *words_of(given), *profile])


def plan_line(plan: Plan) -> str:
    """Returns the command that makes the plan anew."""
    words = ["openrecycle", "plan", "--profile", "profile.json"]
    for worker in plan.failed:
        words += ["--fail", worker]
    words += ["--technique", plan.technique.value, "--memory", plan.memory]
    if plan.partition != plan.job.partition:
        words += ["--partition", ",".join(map(str, plan.partition))]
    return shlex.join(words)


def catalog_line(plan: Plan, failures: int) -> str:
    """Returns the command that makes, or goes on from, the catalog that has plans for so many failures and for the
    plan's, and for one at least; "": there are no plans for failures."""
    if not most_failures(CatalogQuestion(plan.job.job(), plan.technique, MemoryLimit(plan.memory))):
        return ""
    words = ["openrecycle", "catalog", "--profile", "profile.json"]
    words += ["--technique", plan.technique.value, "--memory", plan.memory]
    return shlex.join([*words, "--tolerance", str(max(failures, len(plan.failed), 1)), "--out", "catalog"])


def _slots(job: JobDoc) -> bool:
    """Says whether the job is the one that the command line plans for if no op times are given."""
    return job.job() == Job.uniform(job.pipelines, job.stages, job.micro_batches)


def _readme(
    plan: Plan, name: str, spec: JobSpec | None, files: dict[str, str], left_out: list[str], failures: int
) -> str:
    job, metrics, unit = plan.job, plan.metrics, plan.job.time_unit
    lines = [
        f"# {' '.join(name.split())}",
        "",
        f"{job.pipelines} pipelines × {job.stages} stages × {job.micro_batches} micro-batches, "
        f"failed: {', '.join(plan.failed) or 'none'}; technique {plan.technique.value}, memory limit {plan.memory}.",
        f"Period {metrics.period:,.6g} {unit}, proven lower bound {metrics.lower_bound:,.6g} {unit}, "
        f"{metrics.slowdown_vs_1f1b:+.1%} against fault-free 1F1B. "
        f"Fingerprint {plan.fingerprint}.",
        "",
        "| file | what |",
        "|---|---|",
        *(f"| {file} | {about} |" for file, about in sorted(files.items())),
        "",
    ]
    if left_out:
        lines += ["Left out:", "", *(f"- {sentence}" for sentence in left_out), ""]
    ahead = catalog_line(plan, failures)
    lines += [
        f"Check the plan, {'make it anew, or plan ahead for failures' if ahead else 'or make it anew'}:",
        "",
        "```sh",
        "openrecycle check plan.json",
        plan_line(plan),
        *filter(None, [ahead]),
        "```",
        "",
    ]
    lines += [
        "Start a job with this grid and these op times. Add `--workload MODULE:FACTORY` for your model: without it, "
        "the example GPT is trained. Add `--console http://HOST:PORT` to watch it:",
        "",
        "```sh",
        launch_line(plan, spec),
        "```",
        "",
    ]
    if plan.failed:
        lost = f"{', '.join(plan.failed)} {'is' if len(plan.failed) == 1 else 'are'}"
        lines += [f"It starts with all workers; this plan comes into force when {lost} lost.", ""]
    return "\n".join(lines)


BUNDLE, BUNDLE_TYPE = "bundle", "application/zip"
MAX_OPS = 2_000_000
# Files of larger plans are made in a child, since the console's own work would wait for them too long.
OPS_HERE = 20_000
CHILD_SECONDS = 120.0
# The error code for a plan that can't be written in a format.
_NOT_IN_THIS = "not_in_this_format"


@dataclass(frozen=True)
class ExportOffer:
    """One format of one plan. pipeline: the one that the file holds, if it can't hold all. refusal: why there is no
    file, and what to use instead."""

    name: str
    title: str
    media_type: str
    file_name: str
    pipeline: int | None = None
    refusal: ConsoleError | None = None


@dataclass(frozen=True)
class Export:
    """A plan to export. name: for people. spec, catalog, job_id: of the job that it belongs to, if any; only the bundle
    calls `catalog`."""

    plan: Plan
    name: str
    spec: JobSpec | None = None
    catalog: Callable[[], Catalog] | None = None
    job_id: str | None = None


def offers(plan: Plan, name: str, job_id: str | None = None) -> list[ExportOffer]:
    """Returns every format, also those that are refused for this plan. job_id: of the job that the plan belongs to."""
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
    """Returns the offer of one format. Raises ConsoleError (422) for an unknown format."""
    found = {offer.name: offer for offer in offers(plan, name, job_id)}
    if wanted not in found:
        raise ConsoleError(422, "invalid", f"got {wanted!r}, expected one of {', '.join(found)}", field="format")
    return found[wanted]


def render(export: Export, offer: ExportOffer, pipeline: int | None = None) -> bytes:
    """Returns the file. pipeline: to be used in place of the offer's. Raises ConsoleError (413, 422, 503).

    Blocks; the file of a large plan is made in a child process.
    """
    if offer.refusal is not None:
        raise offer.refusal
    pipeline = offer.pipeline if pipeline is None else pipeline
    if is_small(export.plan):
        return _made(export.plan, export.name, export.spec, _part(export, offer.name), offer.name, pipeline)
    return _in_child(export, offer.name, pipeline)


def is_small(plan: Plan) -> bool:
    """Says whether files of the plan are made in the console's own process, within milliseconds."""
    return plan.op_count <= OPS_HERE


def document(plan: Plan) -> bytes:
    """Returns the Plan document. Raises ConsoleError (503). Blocks; that of a large plan is made in a child process."""
    if is_small(plan):
        return plan.to_json().encode()
    return _in_child(Export(plan, ""), "json", None).removesuffix(b"\n")


def file_stem(plan: Plan, name: str, job_id: str | None = None, at: float | None = None) -> str:
    """Returns a file name without its ending, with the job, the plan and the day (UTC), such as
    `demo-6f1c2a-3x4x6-without-W1_2-staggered-1a2b3c4d-2026-11-22`.

    The plan's name is cut at a colon, and before words that the file name repeats. at: POSIX seconds (default: now).
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


def _refusal(plan: Plan, name: str) -> ConsoleError | None:
    ops, large, unfit = plan.op_count, partial(ConsoleError, 413, "too_large"), partial(ConsoleError, 422, _NOT_IN_THIS)
    if ops > MAX_OPS:
        return large(f"the plan has {ops:,} ops and the console exports at most {MAX_OPS:,}")
    if name == "yaml" and ops > text_formats.MAX_OPS:
        most = text_formats.MAX_OPS
        return large(f"the plan has {ops:,} ops and YAML is written for at most {most:,}; use JSON")
    if name == BUNDLE and plan.solver.name == MEASURED:
        why = "this is an iteration as it ran, which no job can be started with; take the plan that it ran"
        return unfit(why)
    if name == "torch-csv" and (plan.failed or any(plan.rerouted().values())):
        why = (
            "torch.distributed.pipelining runs each stage on one rank, so a plan that re-routes can't be written in it"
        )
        return unfit(why)
    return None


def _part(export: Export, name: str) -> CatalogPart:
    if name != BUNDLE:
        return CatalogPart({}, "")
    return catalog_part(export.catalog() if export.catalog else None)


def _made(
    plan: Plan, called: str, spec: JobSpec | None, catalog: CatalogPart, name: str, pipeline: int | None
) -> bytes:
    try:
        if name == BUNDLE:
            return make_bundle(plan, called, spec, catalog)
        return EXPORTERS[name].render(plan, pipeline=pipeline)
    except PlannerError as error:
        raise ConsoleError(422, _NOT_IN_THIS, in_words(error)) from None


def _in_child(export: Export, name: str, pipeline: int | None) -> bytes:
    spec = export.spec.model_dump_json() if export.spec else ""
    question = packed(export.plan), export.name, spec, _part(export, name), name, pipeline
    file: bytes
    (file,) = _CHILDREN.ask(*question, timeout=CHILD_SECONDS, wait=CHILD_SECONDS)
    return file


def make_file(
    channel: Channel, data: bytes, called: str, spec: str, catalog: CatalogPart, name: str, pipeline: int | None
) -> None:
    """Makes a file, in the child."""
    parsed = JobSpec.model_validate_json(spec) if spec else None
    channel.say(_made(unpack(data), called, parsed, catalog, name, pipeline))


_CHILDREN = Children(make_file, name="export", most=2, instead="use the command line")
