"""A plan in other programs' formats. `EXPORTERS` is the one list: the command line and the console read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from openrecycle.planner.export.picture import to_png, to_svg
from openrecycle.planner.export.text_formats import to_chrome_trace, to_tidy_csv, to_torch_csv, to_yaml
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.plans.plan import Plan


@dataclass(frozen=True)
class ExportFormat:
    """name: as the user types it. suffix: with its dot. title: for a menu or a button.

    exporter: a pure function of a valid plan (see planner.check), which raises PlannerError when it can't export it.
    of_pipeline: whether it also takes the number of a pipeline, to export that one alone.
    """

    name: str
    title: str
    media_type: str
    suffix: str
    exporter: Callable[..., str | bytes]
    of_pipeline: bool = False

    def render(self, plan: Plan, *, pipeline: int | None = None) -> bytes:
        """Returns the file's bytes; text is UTF-8.

        pipeline: export this one alone, if the format can. Raises InputError for a pipeline that the job does not
        have, or where the format always holds the whole plan; PlannerError when the exporter refuses.
        """
        if pipeline is None:
            content = self.exporter(plan)
        elif not self.of_pipeline:
            raise InputError("--pipeline", pipeline, f"nothing: {self.name} always holds the whole plan")
        elif not 0 <= pipeline < plan.job.pipelines:
            raise InputError("--pipeline", pipeline, f"a pipeline of the plan, 0 to {plan.job.pipelines - 1}")
        else:
            content = self.exporter(plan, pipeline)
        return content if isinstance(content, bytes) else content.encode()


def to_json(plan: Plan) -> str:
    return plan.to_json() + "\n"


__all__ = ["EXPORTERS", "ExportFormat", "format_named"]

EXPORTERS: Mapping[str, ExportFormat] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            ExportFormat("chrome-trace", "Chrome trace (Perfetto)", "application/json", ".trace.json", to_chrome_trace),
            ExportFormat(
                "torch-csv", "PyTorch pipelining CSV", "text/csv", ".torch.csv", to_torch_csv, of_pipeline=True
            ),
            ExportFormat("csv", "CSV, one line per op", "text/csv", ".csv", to_tidy_csv),
            ExportFormat("json", "JSON plan document", "application/json", ".json", to_json),
            ExportFormat("yaml", "YAML plan document", "application/yaml", ".yaml", to_yaml),
            ExportFormat("svg", "SVG picture", "image/svg+xml", ".svg", to_svg, of_pipeline=True),
            ExportFormat("png", "PNG picture", "image/png", ".png", to_png, of_pipeline=True),
        )
    }
)


def format_named(name: str) -> ExportFormat:
    """Return a format by name. Raises InputError for an unknown name."""
    try:
        return EXPORTERS[name]
    except KeyError:
        raise InputError("--format", name, "one of " + ", ".join(EXPORTERS)) from None
