"""The OpenAPI document: FastAPI's own, put right where it says something else than what is answered; and the same for
people to read, as one HTML page without scripts or anything from elsewhere.
"""

from __future__ import annotations

from html import escape
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


METHODS = ("get", "post", "put", "delete")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def page(document: dict[str, Any], base: str) -> str:
    """base: the path that the document's paths are below."""
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method in METHODS:
            if operation := operations.get(method):
                groups.setdefault(operation["tags"][0], []).append(_operation(base + path, method, operation))
    links = " ".join(f'<a href="#{escape(tag)}">{escape(tag)}</a>' for tag in sorted(groups))
    parts = [f'<h2 id="{escape(tag)}">{escape(tag)}</h2>{"".join(groups[tag])}' for tag in sorted(groups)]
    schemas = document["components"]["schemas"]
    messages = "".join(_schema(name, schema) for name, schema in sorted(schemas.items()))
    about = escape(document["info"]["description"])
    return _PAGE.format(
        about=about, links=links, operations="".join(parts), messages=messages, document=f"{base}/openapi.json"
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = [
        _row(p["name"], p["in"], _type(p["schema"]), p.get("description", "") + (" (needed)" if p["required"] else ""))
        for p in operation.get("parameters", [])
    ]
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        rows.append(_row("body", media_type, _type(content.get("schema", {})), ""))
    for status, answer in operation["responses"].items():
        for media_type, content in (answer.get("content") or {"": {}}).items():
            kind = _type(content.get("schema") or content.get("itemSchema", {}))
            rows.append(_row(status, media_type, kind, answer.get("description", "")))
    text = escape(operation.get("description", "")).replace("\n\n", "<br>")
    return (
        f"<details><summary><code><b>{method.upper()}</b> {escape(path)}</code></summary>"
        f"<div>{text}</div><table>{''.join(rows)}</table></details>"
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    needed = schema.get("required", [])
    rows = [
        _row(field, "needed" if field in needed else "", _type(kind), kind.get("description", ""))
        for field, kind in schema.get("properties", {}).items()
    ]
    rows = rows or [_row("", "", _type(schema), "")]
    text = escape(schema.get("description", "")).replace("\n\n", "<br>")
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"<div>{text}</div><table>{''.join(rows)}</table></details>"
    )


def _row(name: str, where: str, kind: str, text: str) -> str:
    """kind: HTML already."""
    return f"<tr><td><code>{escape(name)}</code><td>{escape(where)}<td>{kind}<td>{escape(text)}</tr>"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_type(option) for option in schema[key])
    if "enum" in schema or "const" in schema:
        return escape(", ".join(map(repr, schema.get("enum", [schema.get("const")]))))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    limits = {"minimum": "≥ {}", "maximum": "≤ {}", "exclusiveMinimum": "> {}", "maxLength": "at most {} characters"}
    said = [text.format(schema[key]) for key, text in limits.items() if key in schema]
    return escape(" ".join([str(schema.get("type", "anything")), *said]))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>OpenReCycle: API</title><style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
summary {{ cursor: pointer; padding: .25rem 0; overflow-wrap: anywhere }}
details {{ border-bottom: 1px solid #8a949e55 }} details > div {{ padding: .25rem 1rem }}
table {{ display: block; overflow-x: auto; border-spacing: 1rem .25rem; font-size: .9rem }}
td {{ vertical-align: top }} nav a {{ margin-right: 1rem }}
</style></head><body><main><h1>OpenReCycle: API</h1><p>{about}
The same for programs: <a href="{document}">openapi.json</a>.</p><nav>{links} <a href="#messages">messages</a></nav>
{operations}<h2 id="messages">messages</h2>{messages}</main></body></html>
"""
