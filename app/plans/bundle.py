"""The job bundle: one zip with all that is needed to read a plan, and to run its job elsewhere."""

from __future__ import annotations

import io
import shlex
import zipfile
from typing import NamedTuple

from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.export import EXPORTERS
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.plan import JobDoc, Plan

# A catalog of more ops than this makes the bundle too large to hand around.
CATALOG_OPS = 1_000_000
PICTURE_OPS = 20_000


class CatalogPart(NamedTuple):
    """document: as JSON, empty where there is none to give; about: what it is, or why there is none."""

    document: str
    about: str


def catalog_part(catalog: Catalog | None) -> CatalogPart:
    if catalog is None or not len(catalog):
        return CatalogPart("", "no plans were made ahead for this job")
    size = sum(made.op_count for made in catalog.plans)
    if size > CATALOG_OPS:
        return CatalogPart("", f"{len(catalog)} plans with {size:,} ops in all; make it with the line below")
    about = f"The plans made ahead, {len(catalog)} failure patterns (planner.catalogs.catalog.Catalog.from_json)."
    return CatalogPart(catalog.to_json() + "\n", about)


def make_bundle(plan: Plan, name: str, spec: JobSpec | None, catalog: CatalogPart) -> bytes:
    """plan.json, profile.json (the job that was planned for), plan.svg, catalog.json, README.md.

    spec, catalog: of the job that the plan belongs to. The picture is left out of large plans, the
    catalog where there is none or it is too large; the README says so.
    """
    files: dict[str, tuple[str, str]] = {
        "plan.json": ("The plan: every op with its worker and its times.", plan.to_json() + "\n"),
        "profile.json": (
            "The job that was planned for: grid, op times by stage, transfers, memory.",
            plan.job.model_dump_json(indent=1) + "\n",
        ),
    }
    left_out = []
    ops = plan.op_count
    if ops <= PICTURE_OPS:
        try:
            files["plan.svg"] = ("A picture of it.", EXPORTERS["svg"].render(plan).decode())
        except PlannerError as error:
            left_out.append(f"plan.svg: {error}.")
    else:
        left_out.append(f"plan.svg: {ops:,} ops are too many for a picture here.")
    if catalog.document:
        files["catalog.json"] = (catalog.about, catalog.document)
    else:
        left_out.append(f"catalog.json: {catalog.about}.")
    files["README.md"] = ("This text.", "")
    files["README.md"] = ("This text.", _readme(plan, name, spec, {k: v[0] for k, v in files.items()}, left_out))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for file_name, (_, content) in sorted(files.items()):
            # A fixed time: equal plans make equal bundles.
            entry = zipfile.ZipInfo(file_name, (2020, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return out.getvalue()


def launch_line(plan: Plan, spec: JobSpec | None) -> str:
    """The command that starts the plan's job, with the console's address left to the reader."""
    job = plan.job
    words = ["openrecycle", "train"]
    for option in ("pipelines", "stages", "micro_batches"):
        words += [f"--{option.replace('_', '-')}", str(getattr(job, option))]
    technique = spec.technique if spec else plan.technique.value
    words += ["--technique", technique, "--memory", spec.memory if spec else plan.memory]
    if spec is not None:
        words += ["--iterations", str(spec.iterations), "--seed", str(spec.seed), "--name", spec.name]
    if spec is not None and spec.paced and spec.durations:
        words += ["--pace", ",".join(f"{kind}={ms:g}ms" for kind, ms in spec.durations.items())]
    elif not _slots(job):
        words += ["--profile", "profile.json"]
        words += ["--pace", "profile"] if spec is not None and spec.paced else []
    if spec is not None and spec.demo:
        words.append("--demo")
    return shlex.join(words)


def plan_line(plan: Plan, *, command: str = "plan") -> str:
    """The command that makes the plan, or its catalog, anew."""
    words = ["openrecycle", command, "--profile", "profile.json"]
    if command == "plan":
        for worker in plan.failed:
            words += ["--fail", worker]
    words += ["--technique", plan.technique.value, "--memory", plan.memory]
    if command == "catalog":
        words += ["--tolerance", str(max(1, len(plan.failed))), "--out", "catalog"]
    return shlex.join(words)


def _slots(job: JobDoc) -> bool:
    """Is it what the command line plans for without any op times?"""
    plain = all((p.forward, p.input_backward, p.weight_backward, p.optimizer) == (1, 1, 1, 0) for p in job.profiles)
    return plain and job.time_unit == "slot" and not any(job.transfers) and not job.speeds


def _readme(plan: Plan, name: str, spec: JobSpec | None, files: dict[str, str], left_out: list[str]) -> str:
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
    lines += [
        "Check the plan, make it anew, or plan ahead for failures:",
        "",
        "```sh",
        "openrecycle check plan.json",
    ]
    lines += [plan_line(plan), plan_line(plan, command="catalog"), "```", ""]
    lines += [
        "Start the job (add `--console http://HOST:PORT` to watch it):",
        "",
        "```sh",
        launch_line(plan, spec),
        "```",
        "",
    ]
    if plan.failed:
        lines += [f"It starts with all workers; this plan comes into force when {', '.join(plan.failed)} fail.", ""]
    return "\n".join(lines)
