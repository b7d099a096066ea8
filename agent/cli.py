"""The agent's command line: `openrecycle train` and `openrecycle profile`.

Errors are sentences, and options are made of the fields that agent.config.options defines. torch is imported inside the
commands only: help, and bad input, should not have to wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer

from openrecycle.agent.config.devices import Platform
from openrecycle.agent.config.options import (
    FLAGS,
    GRID,
    Optimization,
    Planning,
    TrainingOptions,
    parse_bytes,
)
from openrecycle.agent.config.settings import Leaf, build, leaves, spelled, without_none
from openrecycle.agent.jobs.start import check_writable, look_at, make_launcher, take_over
from openrecycle.agent.launcher.processes import preload, start_worker_server
from openrecycle.agent.launcher.record import is_remark, sentence_of
from openrecycle.agent.messages.client import ConsoleRefused, ConsoleUnavailable, Delivery, Line, Record
from openrecycle.agent.models.workload import NamedWorkload, WorkloadSource
from openrecycle.agent.nodes.role import LedElsewhere, NodeRole, check_token, is_single, role_of
from openrecycle.planner.jobs.errors import InputError, PlannerError, shown, where_raised
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.jobs.words import printable
from openrecycle.planner.output import check_out, is_stdout, run, write_out
from openrecycle.planner.plans.plan import read_json, read_whole
from openrecycle.planner.profiles import Profile, job_on, load

if TYPE_CHECKING:
    from openrecycle.agent.launcher.launch import Launcher
    from openrecycle.agent.nodes.server import Succession
    from openrecycle.agent.workers.spec import RunSpec


# -- what the agent's commands share ------------------------------------------------------------


def import_from_here() -> None:
    """Has modules found in the current folder, where people keep what they train: as `python -m` does, and an installed
    script does not. They come last, so that a file there stands for no package."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path and not sys.flags.safe_path:
        sys.path.append(here)


def flags_of(leaves: Iterable[Leaf]) -> dict[str, inspect.Parameter]:
    """What typer makes a command's options of, by the option's path."""
    out = {}
    for leaf in leaves:
        about = leaf.field.metadata
        if leaf.flag is None:
            continue
        kinds = without_none(leaf.annotation)
        many = get_origin(kinds[0]) is Sequence
        kind: Any = next((k for k in (bool, str, float, int) if k in kinds), str)
        declared = f"{leaf.flag}/--no-{leaf.flag[2:]}" if kind is bool else leaf.flag
        panel = leaf.path.partition(".")[0].title() if "." in leaf.path else None
        shown = typer.Option(declared, help=about["help"], envvar=about["env"], rich_help_panel=panel)
        default = None if many else leaf.default
        annotation: Any = list[str] | None if many else (kind | None if default is None else kind)
        out[leaf.path] = inspect.Parameter(
            leaf.path.replace(".", "_"),
            inspect.Parameter.KEYWORD_ONLY,
            default=str(default) if kind is str and default is not None else default,
            annotation=Annotated[annotation, shown],
        )
    return out


def with_flags(leaves: Iterable[Leaf]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command, beside its own options, those of `leaves`: it gets them as `given`, by their paths."""
    added = flags_of(leaves)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            given = {path: arguments.pop(parameter.name) for path, parameter in added.items()}
            command(**arguments, given={path: value for path, value in given.items() if value is not None})

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + list(added.values())
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__wrapped__  # typer would look there
        return run

    return decorate


@contextmanager
def sentences() -> Iterator[None]:
    """Turns every expected error into one sentence, with the options as the command line has them, and exit code 2."""
    try:
        with spelled({**FLAGS, **GRID, "profile": "--profile"}):
            yield
    except PlannerError as error:
        refuse(f"{error}{where_raised(error.__cause__)}")
    except ConsoleUnavailable as error:
        hint = "; start one with `openrecycle serve`" if error.silent else ""
        refuse(f"--console: {error}{hint}")
    except ConsoleRefused as error:
        refuse(f"the console refused the job: {error}")


def refuse(sentence: str) -> None:
    typer.echo(printable(f"error: {sentence}", keep="\n"), err=True)
    raise typer.Exit(2)


def json_object(text: str) -> dict[str, Any]:
    """Raises InputError unless `text` is a JSON object."""
    try:
        value = read_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError("--workload-options", text, 'a JSON object such as {"width": 128}')
    return value


def read_token(path: Path | None) -> str | None:
    """The console's token from a file, else from OPENRECYCLE_TOKEN. Raises InputError."""
    if path is None:
        return os.environ.get("OPENRECYCLE_TOKEN") or None
    try:
        return read_whole(path).decode().strip()
    except OSError as error:
        raise InputError("--token-file", str(path), f"a readable file ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError("--token-file", str(path), "a text file") from None


DEFAULT_GRID = (3, 4, 6)
"""Pipelines, stages and micro-batches of a job that says nothing else."""

# -- `openrecycle train` ------------------------------------------------------------------------

INCOMPLETE = 3
"""Exit status of a job that trained to its end, but whose record lacks lines."""


@with_flags(leaves(TrainingOptions))
def train(
    context: typer.Context,
    pipelines: Annotated[
        int | None, typer.Option(help="Data-parallel pipelines: 3, or as the profile has it.", show_default=False)
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Pipeline stages: 4, or as the profile has it.", show_default=False)
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(help="Micro-batches per pipeline and iteration: 6, or as the profile has it.", show_default=False),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Op times to plan with: a file of `profile`, a shipped profile's name, or the document of a job."
        ),
    ] = None,
    workload: Annotated[
        str, typer.Option(help="module:factory of what is trained.")
    ] = "openrecycle.agent.examples.gpt:Gpt",
    workload_options: Annotated[str, typer.Option(help="JSON object with the factory's arguments.")] = "{}",
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token of the console, which is also the secret that all nodes share. Default: "
            "OPENRECYCLE_TOKEN."
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of this job; the command runs on each.")] = None,
    node_rank: Annotated[int | None, typer.Option(help="Number of this node, from 0; node 0 leads at first.")] = None,
    lead: Annotated[str | None, typer.Option(help="HOST:PORT of node 0, as every node reaches it.")] = None,
    node_address: Annotated[
        str | None,
        typer.Option(
            help="Address at which other nodes reach this node's workers. Default: the one that leads to node 0."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be refused, and what memory workers take; start nothing.")
    ] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Start a job of PIPELINES x STAGES workers, here or on several nodes, and train through failures."""
    with sentences():
        token = read_token(token_file)
        role = role_of(os.environ, nodes, node_rank, lead)
        single = is_single(os.environ, nodes)
        if single and node_address is not None:
            raise InputError("--node-address", node_address, "--nodes beside it")
        if single and token_file is not None and given.get("console.url") is None:
            raise InputError("--token-file", str(token_file), "--console or --nodes beside it")
        if role is not None:
            check_token(role, token)
            if dry_run and not role.leads:
                raise InputError("--dry-run", True, "node 0, which knows the job")
        source = NamedWorkload(workload, json_object(workload_options))
        record = Path(given["record"]) if given.get("record") else None
        if record is not None:
            check_writable(record)
        stopped: list[int] = []
        printing = PrintedLines()
        terminal = Delivery(printing, "printing", printing.remark)

        def say(text: str) -> None:
            terminal({"said": text})

        written: Record | None = None

        def listener(line: Line) -> None:
            if written is not None:
                written(line)
            terminal(line)

        status, last, whole = 0, "", True
        import_from_here()
        try:
            launcher: Launcher | None = None
            elsewhere: tuple[str, int] | None = None
            if role is None or role.leads:
                planning: Planning = build(Planning, given, "planning.")
                job = _job((pipelines, stages, micro_batches), profile, planning)
                options: TrainingOptions = build(TrainingOptions, {**given, "console.token": token}, job=job)
                options.check()
                if dry_run:
                    look_at(options, source, say, role)
                    return
                try:
                    launcher = make_launcher(options, source, listener, say, role=role)
                except LedElsewhere as led:
                    say(str(led))
                    elsewhere = led.lead
            earlier: Iterable[bytes] = ()
            if launcher is None:
                assert role is not None
                typed = {name for name in context.params if _is_typed(context, name)}
                sizes = {"job.pipelines": pipelines, "job.stages": stages, "job.micro_batches": micro_batches}
                own = {path: value for path, value in sizes.items() if value is not None}
                own |= {path: value for path, value in given.items() if path.replace(".", "_") in typed}
                unused = partial(_unused, own, profile, source, typed)
                succession = serve_node(role, token, node_address, source, stopped, elsewhere, unused)
                if succession is None:
                    return
                launcher, earlier = take_over(succession, listener, say), succession.record.parts()
            if record is not None:
                written = Record(record, say, earlier)
            # Only now, so that bad input has not waited for torch.
            from openrecycle.agent.launcher.launch import JobFailed, Stopped

            def stop(number: int, _frame: object) -> None:
                stopped.append(number)
                launcher.stop(number)

            for number in stopped:
                launcher.stop(number)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, stop)
            try:
                launcher.run()
            except Stopped as stop_asked:
                status, last = 128 + stop_asked.signal, str(stop_asked)
            except JobFailed as failure:
                status = 1
                say(f"the job ended early: {failure}")
        finally:
            whole = written is None or written.close(lambda: bool(stopped))
            told = terminal.close(lambda: bool(stopped))
        if not told:
            os._exit(status or 128 + stopped[0])  # standard output takes nothing, and Python would wait for it
        if last:
            printing.show(last)
        if status or not whole:
            raise typer.Exit(status or INCOMPLETE)


def _job(grid: tuple[int | None, int | None, int | None], profile: Path | None, planning: Planning) -> Job:
    """grid: pipelines, stages, micro-batches, where they are given. Raises InputError."""
    if profile is None:
        if planning.by_profile:
            raise planning.refuse("pace", "`profile` too, which says how long the ops take")
        sizes = (default if size is None else size for size, default in zip(grid, DEFAULT_GRID, strict=True))
        return planning.job(Job.uniform(*sizes))
    document = load(profile)
    job = job_on(document, *grid)
    return planning.job(Job(job.pipelines, job.stages, job.micro_batches), document)


class PrintedLines:
    """Shows the record's lines, in words: iterations on standard output, what is out of the ordinary on standard
    error. One that is closed, or full, is said on the other, and left alone from then on."""

    def __call__(self, line: Line) -> None:
        if is_remark(line):
            self.remark(sentence_of(line))
        elif line.keys().isdisjoint(("gradient_norm", "validation")):  # a line per iteration is enough
            self.show(sentence_of(line))

    def show(self, text: str) -> None:
        try:
            typer.echo(printable(text, keep="\n"))
        except OSError as error:
            _leave(sys.stdout)
            self.remark(f"warning: nothing can be printed any more ({error.strerror}); training goes on")

    def remark(self, text: str) -> None:
        try:
            typer.echo(printable(text, keep="\n"), err=True)
        except OSError:
            _leave(sys.stderr)


def _leave(stream: Any) -> None:
    """What is written to it goes nowhere, from now on and when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _is_typed(context: typer.Context, name: str) -> bool:
    """Is an option on the command line, or in the environment?"""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _unused(given: Mapping[str, Any], profile: Path | None, own: NamedWorkload, typed: set[str], run: RunSpec) -> str:
    """Says which options of this node's command the job does not use; "": it uses all of them.

    given: options by path. profile, own: of the command. typed: the names of its options that are no default.
    """
    options, workload, flags = run.options, run.workload, {**FLAGS, **GRID}
    kept = {path: value for path, value in given.items() if path != "record"}  # is written where this node leads
    differ = {flags[path]: values for path, values in options.unlike(kept).items()}
    if profile is not None and not _made_of(profile, run):
        differ["--profile"] = str(profile), "other op times"
    if isinstance(workload, NamedWorkload):
        if own.path != workload.path and "workload" in typed:
            differ["--workload"] = own.path, workload.path
        if own.options != workload.options and "workload_options" in typed:
            differ["--workload-options"] = dict(own.options), dict(workload.options)
    if not differ:
        return ""
    each = ", ".join(f"{flag} {shown(here)} (there: {shown(there)})" for flag, (here, there) in differ.items())
    return f"warning: the options that node 0 began the job with count on all nodes; not used here: {each}"


def _made_of(profile: Path, run: RunSpec) -> bool:
    """Are the op times that a job plans with those of this profile?"""
    planning, job = run.options.planning, run.options.job
    try:
        made = _job((job.pipelines, job.stages, job.micro_batches), profile, planning)
        return planning.layered(made, sum(run.partition) or None) == job
    except PlannerError:
        return False


LEAD_SECONDS = 600.0


def serve_node(
    role: NodeRole,
    token: str | None,
    address: str | None,
    workload: WorkloadSource,
    stopped: list[int],
    lead: tuple[str, int] | None,
    unused: Callable[[RunSpec], str],
) -> Succession | None:
    """Until the job is over, or this node is to lead; ends the program with exit status 1 when no lead can be had.

    workload: what the lead will ask for; its modules are imported meanwhile. stopped: gets the numbers of
    signals that came. lead: where it listens, if not where `role` says. unused: as in NodeServer.
    """
    start_worker_server(preload(workload))
    from openrecycle.agent.nodes.role import find_lead
    from openrecycle.agent.nodes.server import LeadLost, NodeServer
    from openrecycle.agent.workers.spec import same_on_all

    front = (role.host, role.port)
    if role.store is not None and not role.leads:
        try:
            front = find_lead(role.store)
        except RuntimeError:
            expected = f"HOST:PORT, since torchrun's store at {role.host} names none: perhaps node 0 could not start"
            raise InputError("--lead", None, expected) from None
    say = partial(typer.echo, err=True)
    same = same_on_all(workload)
    server = NodeServer(role.rank, role.nodes, front, token, address, say, lead, same=same, unused=unused)

    def stop(number: int, _frame: object) -> None:
        stopped.append(number)
        server.stop(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        ended = server.run(LEAD_SECONDS)
    except LeadLost as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(128 + stopped[0] if stopped else 1) from None
    if not isinstance(ended, str):
        return ended
    typer.echo(ended)
    return None


# -- `openrecycle profile` ----------------------------------------------------------------------

MODELS_HELP = "gpt-3-medium, gpt-3-3.35b or gpt-3-6.7b: one layer, the embedding and the head are measured."
MAX_REPEATS = 1000


TRAINED_WITH = (
    *("optimization.mode", "optimization.autocast", "optimization.clip_norm", "optimization.sharding"),
    *("planning.capacity", "platform.device", "platform.transport"),
)
"""Options of `train` that a profile is measured with."""


@with_flags(leaf for leaf in leaves(TrainingOptions) if leaf.path in TRAINED_WITH)
def profile_command(
    out: Annotated[Path, typer.Option(help="JSON file to write; `openrecycle plan --profile` reads it.")],
    model: Annotated[str | None, typer.Option(help=MODELS_HELP)] = None,
    workload: Annotated[
        str | None, typer.Option(help="module:factory, as for train: each of its layers is measured.")
    ] = None,
    workload_options: Annotated[str, typer.Option(help="JSON object with the factory's arguments.")] = "{}",
    pipelines: Annotated[int, typer.Option(help="Of the job; reductions are measured among up to this many.")] = 2,
    stages: Annotated[int, typer.Option(help="Stages of the job.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per pipeline and iteration.")] = 8,
    batch: Annotated[int, typer.Option(help="Samples per micro-batch, with --model.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed rounds.")] = 10,
    warm_up: Annotated[int, typer.Option(help="Rounds before them that don't count.")] = 2,
    threads: Annotated[int, typer.Option(help="Of torch; workers train with 1.")] = 1,
    spread_limit: Annotated[
        float, typer.Option(help="Largest (p90 - p10) / median that is accepted; inf: any.")
    ] = 0.25,
    *,
    given: dict[str, Any],
) -> None:
    """Measure op times, steps, memory, transfers and reductions of a model on this machine."""
    with sentences():
        Job.uniform(pipelines, stages, micro_batches)
        check_out(out)
        if (model is None) == (workload is None):
            got = "neither" if model is None else "both"
            raise InputError("--model, --workload", got, "one of the two")
        if model is not None and workload_options != "{}":
            raise InputError("--workload-options", workload_options, "nothing beside --model")
        if model is None and batch != 1:
            raise InputError("--batch", batch, "nothing beside --workload, which has its own samples")
        for option, value, least, most in (
            ("--batch", batch, 1, 1 << 20),
            ("--repeats", repeats, 1, MAX_REPEATS),
            ("--warm-up", warm_up, 0, MAX_REPEATS),
            ("--threads", threads, 1, os.cpu_count() or 1),
        ):
            if not least <= value <= most:
                raise InputError(option, value, f"a whole number from {least} to {most}")
        computes_on: Platform = build(Platform, given, "platform.")
        # Written so that NaN fails it too.
        if not spread_limit >= 0:
            raise InputError("--spread-limit", spread_limit, "a number of at least 0")
        optimization: Optimization = build(Optimization, given, "optimization.")
        capacity = build(Planning, given, "planning.").capacity
        capacity_bytes = 0 if capacity is None else parse_bytes(capacity)
        options = json_object(workload_options)
        import_from_here()

        # Only now: importing torch takes seconds, and bad input should not have to wait for it.
        computes_on.check(1)
        import torch

        from openrecycle.agent import profiling

        torch.set_num_threads(threads)
        effort = profiling.ProfilingEffort(repeats, warm_up)
        grid = (pipelines, stages, micro_batches)
        try:
            if model is not None:
                measured = profiling.measure_model(model, batch, grid, optimization, effort, _say, computes_on)
            else:
                measured = profiling.measure_workload(
                    *(workload or "", options, grid, optimization, effort, _say, computes_on)
                )
        except profiling.MeasuringError as error:
            refuse(str(error))
        made = measured.model_copy(update={"capacity_bytes": capacity_bytes}).profile(*grid)
        if made.spread > spread_limit:
            worst = max(made.parts, key=lambda part: part.spread)
            raise InputError(
                "--spread-limit",
                spread_limit,
                f"times that vary less: those of {worst.name} vary by {made.spread:.0%} (p10 to p90, of the median). "
                "Measure on a quiet machine, with more --repeats; or write it with --spread-limit inf",
            )
        write_out(out, (made.model_dump_json(indent=1) + "\n").encode())
    for line in _summary(made):
        typer.echo(line, err=is_stdout(out))
    typer.echo(f"written to {out}", err=is_stdout(out))


def _say(sentence: str) -> None:
    typer.echo(sentence, err=True)


def _summary(made: Profile) -> list[str]:
    """What was measured, for the terminal."""
    on = made.hardware.accelerator or f"{made.hardware.processor}, {made.hardware.threads} threads"
    lines = [f"{made.model} on {on}, {made.hardware.clock} clock"]
    for part in made.parts:
        lines.append(
            f"{part.name:>10}: F {part.forward.median:.3f}  I {part.input_backward.median:.3f}  "
            f"W {part.weight_backward.median:.3f}  step {part.step.median:.3f} ms (spread {part.spread:.0%}); "
            f"holds {part.activation_bytes / 2**20:.1f} MiB until I, {part.weight_backward_bytes / 2**20:.1f} until W"
        )
    if made.transfers:
        lines.append("transfers: " + ", ".join(f"{t.median:.3f} ms" for t in made.transfers))
    if made.reductions is not None:
        times = ", ".join(f"{t.median:.3f} ms among {n}" for n, t in enumerate(made.reductions.by_peers, start=2))
        what = "sums for those who step them, and parameters for all," if made.sharded_over else "reductions"
        lines.append(f"{what} of {made.reductions.bytes / 2**20:.1f} MiB: {times}")
    return lines


# -- command line of the agent ------------------------------------------------------------------

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def callback() -> None:
    """Training processes that survive the death of their peers."""


app.command("train")(train)
app.command("launch", hidden=True)(train)  # as it was called in a clone: `python -m agent launch`
app.command("profile")(profile_command)


def main() -> None:
    run(app)
