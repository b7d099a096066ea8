"""`python -m planner catalog` and `normalize`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from planner.distribution import check_copy_cost
from planner.errors import InputError
from planner.failures import parse_failed
from planner.job import MemoryLimit, Technique
from planner.normalization import SECONDS, Normalization, normalize

DEFAULT_BANDWIDTH = 12.5e9  # bytes per second: a 100 Gb/s link


def normalize_command(
    pipelines: Annotated[int | None, typer.Option(help="Data-parallel pipelines.")] = None,
    stages: Annotated[int | None, typer.Option(help="Stages of each pipeline.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches per pipeline and iteration.")] = None,
    fail: Annotated[list[str] | None, typer.Option(help="A failed worker such as W1_2; repeatable.")] = None,
    technique: Annotated[str, typer.Option(help="adaptive, decoupled or staggered.")] = "staggered",
    memory: Annotated[str, typer.Option(help="Activations per worker: 1f1b, uniform, none or a number.")] = "uniform",
    durations: Annotated[str | None, typer.Option(help="Op times, F=1,I=1,W=1,O=0,transfer=0.")] = None,
    profile: Annotated[Path | None, typer.Option(help="JSON file with the plan document's `job`.")] = None,
    state_bytes: Annotated[
        str, typer.Option(help="Bytes of weights and optimizer state to copy; one number, or one per stage: 1e9,2e9.")
    ] = "0",
    bandwidth: Annotated[float, typer.Option(help="Bytes per second of one copy.")] = DEFAULT_BANDWIDTH,
    heals_in: Annotated[float | None, typer.Option(help="Seconds until the failed workers return, if known.")] = None,
    unit_seconds: Annotated[
        float | None, typer.Option(help="Seconds of one time unit, where its name does not say it (default 1).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Say whether failures should move to other stages, which workers to migrate, and why."""
    from planner.cli import _job  # the cli registers this module

    job = _job(pipelines, stages, micro_batches, durations, profile)
    result = normalize(
        job,
        parse_failed((name for text in fail or [] for name in text.split(",")), job),
        technique=Technique.of(technique),
        memory=MemoryLimit.parse(memory),
        cost=check_copy_cost(job, _byte_counts(state_bytes), bandwidth),
        heals_in=heals_in,
        unit_seconds=unit_seconds,
    )
    units = {"period_now": None if result.period_now is None else job.units(result.period_now)}
    if as_json:
        document = {
            "failures_per_stage": {"now": result.present, "after": result.counts},
            "migrations": [
                {"worker": str(m.worker), "takes": str(m.takes), "source": str(m.source) if m.source else "checkpoint"}
                for m in result.migrations
            ],
            "failed": [str(w) for w in sorted(result.failed)],
            **units,
            "period": job.units(result.period),
            "pause_seconds": result.pause,
            "iterations_gained": result.iterations_gained,
            "reason": result.reason,
        }
        sys.stdout.write(json.dumps(document) + "\n")
        return
    print("\n".join(_lines(result)))
    if heals_in is not None and unit_seconds is None and job.time_unit not in SECONDS:
        print(f"one {job.time_unit} is taken to last 1 s; --unit-seconds says otherwise")


def _lines(result: Normalization) -> list[str]:
    return [
        result.reason,
        *(f"  {migration}" for migration in result.migrations),
        f"failures per stage: {_numbers(result.present)} now, {_numbers(result.counts)} afterwards",
    ]


def _numbers(counts: tuple[int, ...]) -> str:
    return "/".join(map(str, counts))


def _byte_counts(text: str) -> list[int]:
    out = []
    for part in text.split(","):
        try:
            out.append(int(float(part)))
        except (ValueError, OverflowError):
            raise InputError("--state-bytes", part, "a number of bytes, such as 2e9") from None
    return out
