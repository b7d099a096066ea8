"""A plan in other programs' formats. `EXPORTERS` is the one list: the command line and the console read it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from openrecycle.planner.export.chrome_trace import to_chrome_trace
from openrecycle.planner.export.png import to_png
from openrecycle.planner.export.registry import ExportFormat, to_json
from openrecycle.planner.export.svg import to_svg
from openrecycle.planner.export.tidy_csv import to_tidy_csv
from openrecycle.planner.export.torch_csv import to_torch_csv
from openrecycle.planner.export.yaml_document import to_yaml
from openrecycle.planner.jobs.errors import InputError

__all__ = ["EXPORTERS", "Format", "format_named"]

EXPORTERS: Mapping[str, ExportFormat] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            ExportFormat("chrome-trace", "Chrome trace (Perfetto)", "application/json", ".trace.json", to_chrome_trace),
            ExportFormat("torch-csv", "PyTorch pipelining CSV", "text/csv", ".torch.csv", to_torch_csv, to_torch_csv),
            ExportFormat("csv", "CSV, one line per op", "text/csv", ".csv", to_tidy_csv),
            ExportFormat("json", "JSON plan document", "application/json", ".json", to_json),
            ExportFormat("yaml", "YAML plan document", "application/yaml", ".yaml", to_yaml),
            ExportFormat("svg", "SVG picture", "image/svg+xml", ".svg", to_svg, to_svg),
            ExportFormat("png", "PNG picture", "image/png", ".png", to_png, to_png),
        )
    }
)


def format_named(name: str, *, field: str = "--format") -> ExportFormat:
    """Raises InputError for a format that there is none of."""
    try:
        return EXPORTERS[name]
    except KeyError:
        raise InputError(field, name, "one of " + ", ".join(EXPORTERS)) from None
