"""The API for people to read: one HTML page out of the OpenAPI document, without scripts or anything from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

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
            rows.append(_row(status, media_type, _type(content.get("schema", {})), answer.get("description", "")))
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
