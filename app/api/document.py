"""The OpenAPI document: FastAPI's own, put right where it says something else than what is answered."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from app.api.idempotency import HEADER, MOST_CHARACTERS, keeps_keys
from app.api.problems import MEDIA_TYPE

_PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}

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
    return document


def _plain_pairs(node: Any) -> None:
    """Arrays of so many equal things say so in words that tools for OpenAPI 3.0 know, too."""
    if isinstance(node, dict):
        first = node.get("prefixItems")
        if isinstance(first, list) and first and all(item == first[0] for item in first):
            del node["prefixItems"]
            node["items"] = first[0]
        for value in node.values():
            _plain_pairs(value)
    elif isinstance(node, list):
        for value in node:
            _plain_pairs(value)
