"""Command line of the agent: `python -m agent launch`."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from agent.client import ConsoleClient, ConsoleRefused, ConsoleUnavailable, check_url
from agent.faults import Kill, Rejoin
from agent.protocol import JobSpec, Recovery
from agent.recipe import Recipe
from planner.catalog import Catalog
from planner.errors import InputError, PlannerError
from planner.job import Job, MemoryLimit, Problem, Technique

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

PLANNED_FAILURES = 2
"""Without a console, plans are made ahead for up to this many failures."""


@app.callback()
def callback() -> None:
    """Training processes that survive the death of their peers."""


@app.command()
def launch(
    pipelines: Annotated[int, typer.Option(help="Data-parallel pipelines.")] = 3,
    stages: Annotated[int, typer.Option(help="Pipeline stages.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per pipeline and iteration.")] = 6,
    iterations: Annotated[int, typer.Option(help="Iterations to commit.")] = 30,
    record: Annotated[Path | None, typer.Option(help="JSON-lines file: losses, failures, final hash.")] = None,
    console: Annotated[str | None, typer.Option(help="Address of a console, such as http://127.0.0.1:8501.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="The console's token (or OPENRECYCLE_TOKEN).")] = None,
    kill: Annotated[list[str] | None, typer.Option(help="W1_2@10:F3: SIGKILL before that op. Repeatable.")] = None,
    rejoin: Annotated[list[str] | None, typer.Option(help="W1_2@15: start it anew after that iteration.")] = None,
    technique: Annotated[str, typer.Option(help="fault-free, adaptive, decoupled or staggered.")] = "staggered",
    memory: Annotated[str, typer.Option(help="1f1b, uniform, none or a number of micro-batches.")] = "uniform",
    pace: Annotated[str | None, typer.Option(help="F=40ms,I=40ms,W=40ms: stretch each op to this.")] = None,
    seed: Annotated[int, typer.Option(help="Of parameters, data and dropout.")] = 0,
    name: Annotated[str, typer.Option(help="What the console calls the job.")] = "gpt",
    demo: Annotated[bool, typer.Option(help="Let the console kill and restart these processes.")] = False,
    mode: Annotated[str, typer.Option(help="deterministic (same bits after any failure) or fast.")] = "deterministic",
    autocast: Annotated[str | None, typer.Option(help="bf16: run forwards under torch.autocast.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Largest global norm of the gradients.")] = None,
    non_finite: Annotated[str, typer.Option(help="On a NaN or infinite gradient: skip (the step) or stop.")] = "skip",
    synchronous: Annotated[bool, typer.Option(help="No stage steps before the global checks are known.")] = False,
    keep_finished: Annotated[
        bool, typer.Option(help="After a death, don't run again what survivors have finished.")
    ] = False,
    workload: Annotated[str, typer.Option(help="module:factory of what is trained.")] = "agent.examples.gpt:Gpt",
    workload_options: Annotated[str, typer.Option(help="JSON object with the factory's arguments.")] = "{}",
) -> None:
    """Starts a job of PIPELINES x STAGES worker processes on this machine and trains through failures."""
    with _sentences():
        job = Job.uniform(
            pipelines, stages, micro_batches, durations=_milliseconds(pace), time_unit="ms" if pace else "slot"
        )
        limit = MemoryLimit.parse(memory)
        wanted = Technique.of(technique)
        Problem(job, technique=wanted, memory=limit)
        if iterations < 1:
            raise InputError("--iterations", iterations, "a whole number of at least 1")
        if not 0 <= seed < 2**53:
            raise InputError("--seed", seed, "a whole number from 0 to 2^53")
        kills = tuple(Kill.parse(text, job) for text in kill or ())
        rejoins = tuple(Rejoin.parse(text, job) for text in rejoin or ())
        _check_kills(job, wanted, limit, kills, rejoins)
        options = _json_object(workload_options)
        recipe = Recipe(mode, autocast, clip_norm, non_finite, not synchronous, keep_finished)  # type: ignore[arg-type]
        if record is not None:
            _check_writable(record)
        token = _token(token_file)
        if console is not None:
            check_url(console)

        # Only now: importing torch takes seconds, and bad input should not have to wait for it.
        from agent import launch as launching
        from agent.console_link import ConsoleCoordination, create_job
        from agent.coordination import Coordination, LocalCoordination
        from agent.worker import ConsoleLink
        from agent.workload import load_workload

        samples = load_workload(workload, options).samples_per_micro_batch
        link: ConsoleLink | None = None
        coordination: Coordination
        if console is None:
            catalog = Catalog(job, wanted, limit)
            for patterns in catalog.patterns(PLANNED_FAILURES if job.pipelines * job.stages <= 64 else 1):
                for failed in patterns:
                    catalog.add(catalog.plan_for(failed)[0])
            coordination = LocalCoordination(catalog)
        else:
            if not wanted.reroutes:
                raise InputError("--technique", technique, "adaptive, decoupled or staggered with --console")
            spec = _job_spec(
                name=name,
                pipelines=pipelines,
                stages=stages,
                micro_batches=micro_batches,
                iterations=iterations,
                samples_per_micro_batch=samples,
                technique=wanted.value,
                memory=limit.text,
                durations=_milliseconds(pace),
                paced=pace is not None,
                demo=demo,
                seed=seed,
            )
            created = create_job(ConsoleClient(console, token=token), spec)
            link = ConsoleLink(console, created.job_id, token, created.heartbeat_seconds)
            coordination = ConsoleCoordination(
                lambda: ConsoleClient(console, token=token), created.job_id, lambda text: typer.echo(text, err=True)
            )
            typer.echo(f"job {created.job_id} at {console}")

        launcher = launching.Launcher(
            launching.LaunchOptions(
                job=job,
                iterations=iterations,
                seed=seed,
                workload=workload,
                workload_options=options,
                pace={kind: ms / 1000 for kind, ms in _milliseconds(pace).items()},
                kills=kills,
                rejoins=rejoins,
                console=link,
                recipe=recipe,
            ),
            coordination,
            _Record(record),
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda n, _: launcher.stop(n))
        try:
            launcher.run()
        except launching.Stopped as stop:
            typer.echo(str(stop))
            raise typer.Exit(128 + stop.signal) from None
        except launching.JobFailed as failure:
            typer.echo(f"the job ended early: {failure}", err=True)
            raise typer.Exit(1) from None


class _Record:
    """Writes the record's lines to a file and, in words, to the terminal."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w") if path else None

    def __call__(self, line: dict[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        if "failure" in line:
            typer.echo(_recovery_sentence(Recovery(**line["failure"])), err=True)
        elif "final" in line:
            typer.echo(f"parameters {line['final']['parameters_sha256']}")
        else:
            loss = float.fromhex(line["loss"])
            typer.echo(
                f"iteration {line['iteration']:>5}  loss {loss:.4f}  {1000 * line['seconds']:7.1f} ms  "
                f"epoch {line['epoch']}  {line['living']} workers"
            )


def _recovery_sentence(recovery: Recovery) -> str:
    return (
        f"{recovery.worker} died: seen after {recovery.detected_ms:.0f} ms, survivors free after "
        f"{recovery.unblocked_ms:.0f} ms, re-formed after {recovery.reformed_ms:.0f} ms, "
        f"the redone iteration committed after {recovery.resumed_ms:.0f} ms"
    )


@contextmanager
def _sentences() -> Iterator[None]:
    """Turns every expected error into one sentence and exit code 2."""
    try:
        yield
    except PlannerError as error:
        _refuse(str(error))
    except ConsoleUnavailable as error:
        _refuse(f"--console: {error}; start one with `python -m app serve`")
    except ConsoleRefused as error:
        _refuse(f"the console refused the job: {error}")


def _refuse(sentence: str) -> None:
    typer.echo(f"error: {sentence}", err=True)
    raise typer.Exit(2)


def _milliseconds(pace: str | None) -> dict[str, float]:
    """`F=40ms,I=40ms` to milliseconds by op kind. Raises InputError."""
    out: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in (pace or "").split(","))):
        match = re.fullmatch(r"([FIWO])=(\d+(?:\.\d{1,3})?)(ms|s)", part)
        if not match:
            raise InputError("--pace", part, "comma-separated KIND=TIME such as F=40ms, with KIND F, I, W or O")
        out[match[1]] = float(match[2]) * (1000 if match[3] == "s" else 1)
    if pace is not None:
        missing = [kind for kind in "FIW" if not out.get(kind)]
        if missing:
            raise InputError("--pace", pace, f"a time above 0 for {', '.join(missing)} too")
    return out


def _check_kills(
    job: Job, technique: Technique, memory: MemoryLimit, kills: tuple[Kill, ...], rejoins: tuple[Rejoin, ...]
) -> None:
    """Refuses wishes that no plan can survive."""
    if kills and not technique.reroutes:
        raise InputError(
            "--technique", technique.value, "adaptive, decoupled or staggered when a worker is to be killed"
        )
    if not rejoins:
        Problem(job, frozenset(k.worker for k in kills), technique, memory)
    for rejoin in rejoins:
        if all(k.worker != rejoin.worker for k in kills):
            raise InputError("--rejoin", str(rejoin.worker), "a worker that --kill names")


def _job_spec(**fields: Any) -> JobSpec:
    """Raises InputError naming the option that the console would not take."""
    try:
        return JobSpec(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        raise InputError(option, first["input"], f"what a console accepts: {first['msg']}") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError("--workload-options", text, 'a JSON object such as {"width": 128}')
    return value


def _check_writable(path: Path) -> None:
    if not path.parent.is_dir():
        raise InputError("--record", str(path), "a file in a folder that exists")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError("--record", str(path), "a file that can be written")


def _token(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("OPENRECYCLE_TOKEN") or None
    try:
        return path.read_text().strip()
    except OSError as error:
        raise InputError("--token-file", str(path), f"a readable file ({error.strerror})") from None


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
