"""A whole catalog as one file: as documents for any program, or as the command line keeps it."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any, Literal

from openrecycle.app.catalogs.service import Catalogs
from openrecycle.app.runtime.children import Channel, ChildEnded, Children
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.planner.catalogs.catalog_store import INFO, SUFFIX, CatalogInfo
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.packed import decode_plan

# A document takes about 100 bytes per op: beyond this the file would have gigabytes.
MAX_OPS = 2_000_000
SECONDS = 300.0

_README = """OpenReCycle: a catalog of plans made ahead of failures.

catalog.json        the question that all plans answer: job, technique, memory limit
plans/<name>.json   a plan document each; a name begins with its number of failures
index.json          name, failed workers, period, bound and gap of each plan

A plan serves every failure set that differs only in which pipeline is called which.
"""


def exported(catalogs: Catalogs, fingerprint: str, form: Literal["json", "stored"]) -> bytes:
    """A stored catalog as a zip file. Raises ConsoleError."""
    info, blobs = catalogs.stored(fingerprint).info, catalogs.blobs(fingerprint)
    return json_zip(info, blobs) if form == "json" else stored_zip(fingerprint, info, blobs)


def stored_zip(fingerprint: str, info: CatalogInfo, blobs: Mapping[str, bytes]) -> bytes:
    """The folder that `openrecycle catalog --out` writes and goes on from."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:  # plans are compressed already
        archive.writestr(f"{fingerprint}/{INFO}", info.model_dump_json(indent=1) + "\n")
        for name in sorted(blobs):
            archive.writestr(f"{fingerprint}/{name}{SUFFIX}", blobs[name])
    return out.getvalue()


def json_refusal(info: CatalogInfo, plans: int) -> str:
    """Why there is no JSON of so many plans; empty when there is."""
    job = info.job
    ops = 3 * job.pipelines * job.stages * job.micro_batches * plans
    return f"{ops:,} ops in all, and a file of documents holds at most {MAX_OPS:,}" if ops > MAX_OPS else ""


def json_zip(info: CatalogInfo, blobs: Mapping[str, bytes]) -> bytes:
    """A JSON document per plan. Made in a process of its own, for which this thread waits.

    Raises ConsoleError (413) for too many ops, (500) when the process fails.
    """
    if why := json_refusal(info, len(blobs)):
        raise ConsoleError(413, "too_large", f"catalog: {why}; take it as stored")
    try:
        return _CHILDREN.ask(info.model_dump_json(), dict(blobs), timeout=SECONDS)
    except ChildEnded:
        detail = "the catalog could not be written as JSON; the console's log says more"
        raise ConsoleError(500, "internal", detail) from None


def _write(channel: Channel, info: str, blobs: Mapping[str, bytes]) -> None:
    channel.say(documents(CatalogInfo.from_json(info), blobs))


_CHILDREN = Children(_write, name="catalog export", most=2)


def documents(info: CatalogInfo, blobs: Mapping[str, bytes]) -> bytes:
    """As `json_zip`, in this process. What is damaged is left out and named in the index."""
    question = info.question
    index: list[dict[str, Any]] = []
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("README.txt", _README)
        archive.writestr("catalog.json", info.model_dump_json(indent=1) + "\n")
        for name in sorted(blobs):
            try:
                plan = decode_plan(blobs[name], question, source=name)
            except PlannerError as error:
                index.append({"name": name, "error": str(error)})
                continue
            archive.writestr(f"plans/{name}.json", plan.to_json())
            metrics = plan.metrics
            index.append(
                {
                    "name": name,
                    "failed": plan.failed,
                    "fingerprint": plan.fingerprint,
                    "period": metrics.period,
                    "lower_bound": metrics.lower_bound,
                    "gap": metrics.gap,
                    "solver": plan.solver.name,
                }
            )
        archive.writestr("index.json", json.dumps(index, indent=1) + "\n")
    return out.getvalue()
