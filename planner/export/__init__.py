"""A plan in other programs' formats. `EXPORTERS` is the one list: the command line and the console read it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from planner.errors import InputError
from planner.export.chrome_trace import chrome_trace
from planner.export.json_document import json_document
from planner.export.png import png
from planner.export.registry import Format
from planner.export.svg import svg
from planner.export.tidy_csv import tidy_csv
from planner.export.torch_csv import torch_csv
from planner.export.yaml_document import yaml_document

__all__ = ["EXPORTERS", "Format", "format_named"]

EXPORTERS: Mapping[str, Format] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Format("chrome-trace", "Chrome trace (Perfetto)", "application/json", ".trace.json", chrome_trace),
            Format("torch-csv", "PyTorch pipelining CSV", "text/csv", ".torch.csv", torch_csv, torch_csv),
            Format("csv", "CSV, one line per op", "text/csv", ".csv", tidy_csv),
            Format("json", "JSON plan document", "application/json", ".json", json_document),
            Format("yaml", "YAML plan document", "application/yaml", ".yaml", yaml_document),
            Format("svg", "SVG picture", "image/svg+xml", ".svg", svg, svg),
            Format("png", "PNG picture", "image/png", ".png", png, png),
        )
    }
)


def format_named(name: str, *, field: str = "--format") -> Format:
    """Raises InputError for a format that there is none of."""
    try:
        return EXPORTERS[name]
    except KeyError:
        raise InputError(field, name, "one of " + ", ".join(EXPORTERS)) from None
