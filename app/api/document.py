"""The OpenAPI document: FastAPI's own, put right where it says something else than what is answered."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from openrecycle.app.api.idempotency import HEADER, MOST_CHARACTERS, keeps_keys
from openrecycle.app.runtime.problems import MEDIA_TYPE

_PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}

_KEY = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "description": "With the same key, the same request is done once and answered alike, for a day.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MOST_CHARACTERS, "pattern": "^[ -~]+$"},
}


def install(api: FastAPI) -> None:
    generated = api.openapi

    def document() -> dict[str, Any]:
        if api.openapi_schema is None:
            api.openapi_schema = _put_right(generated())
        return api.openapi_schema

    api.openapi = document  # type: ignore[method-assign]


def _put_right(document: dict[str, Any]) -> dict[str, Any]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method == "post" and keeps_keys(path):
                operation.setdefault("parameters", []).append(_KEY)
            for status, answer in operation["responses"].items():
                if status[0] in "45":
                    answer["content"] = dict(_PROBLEM)  # FastAPI adds application/json
    # Kept by validation errors of FastAPI's own, which are none of ours.
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    _plain_pairs(document)
    _link(document["paths"])
    return document


# A path, the list that has what it is about, and what of the list's answer is put into the path.
_FIRST = "$response.body#"
_LISTED = {
    "/jobs/{job_id}": ("/jobs", {"job_id": f"{_FIRST}/jobs/0/job_id"}),
    "/jobs/{job_id}/workers/{worker}": (
        "/jobs/{job_id}/workers",
        {"job_id": "$request.path.job_id", "worker": f"{_FIRST}/workers/0/name"},
    ),
    "/jobs/{job_id}/plans/{fingerprint}": (
        "/jobs/{job_id}/plans",
        {"job_id": "$request.path.job_id", "fingerprint": f"{_FIRST}/plans/0/fingerprint"},
    ),
    "/plans/{fingerprint}": ("/plans", {"fingerprint": f"{_FIRST}/plans/0/fingerprint"}),
    "/catalogs/{fingerprint}": ("/catalogs", {"fingerprint": f"{_FIRST}/catalogs/0/fingerprint"}),
    "/catalogs/{fingerprint}/plans/{name}": (
        "/catalogs/{fingerprint}",
        {"fingerprint": "$request.path.fingerprint", "name": f"{_FIRST}/lines/0/plans/0/name"},
    ),
    "/solves/{solve_id}": ("/solves", {"solve_id": f"{_FIRST}/solves/0/id"}),
    "/profiles/{name}": ("/profiles", {"name": f"{_FIRST}/profiles/0/name"}),
    "/tokens/{token_id}": ("/tokens", {"token_id": f"{_FIRST}/tokens/0/id"}),
}


def _link(paths: dict[str, Any]) -> None:
    """Says of each list which operations take what is in it: programs that explore the API go by that."""
    for path, operations in paths.items():
        about = [place for place in _LISTED if path == place or path.startswith(f"{place}/")]
        if not about:
            continue
        source, parameters = _LISTED[max(about, key=len)]
        links = paths[source]["get"]["responses"]["200"].setdefault("links", {})
        for operation in operations.values():
            name = operation["operationId"]
            links[name] = {"operationId": name, "parameters": parameters}


def _plain_pairs(node: Any) -> None:
    """Arrays of so many equal things say so in words that tools for OpenAPI 3.0 know, too; objects whose keys are
    workers say that they have no others."""
    if isinstance(node, dict):
        first = node.get("prefixItems")
        if isinstance(first, list) and first and all(item == first[0] for item in first):
            del node["prefixItems"]
            node["items"] = first[0]
        if "patternProperties" in node:  # other keys are refused
            node.setdefault("additionalProperties", False)
        for value in node.values():
            _plain_pairs(value)
    elif isinstance(node, list):
        for value in node:
            _plain_pairs(value)
