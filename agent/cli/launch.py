"""`openrecycle train`: trains on this machine, through failures."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openrecycle.agent.cli.shared import import_from_here, json_object, read_token, sentences, with_flags
from openrecycle.agent.config.options import Planning, TrainingOptions
from openrecycle.agent.config.settings import build, leaves
from openrecycle.agent.jobs.start import check_writable, make_launcher, take_over
from openrecycle.agent.launcher.processes import preload, start_worker_server
from openrecycle.agent.launcher.record import is_remark, sentence_of
from openrecycle.agent.messages.delivery import Delivery, Line, Record
from openrecycle.agent.models.workload import NamedWorkload, WorkloadSource
from openrecycle.agent.nodes.role import LedElsewhere, NodeRole, check_token, role_of
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.jobs.words import printable
from openrecycle.planner.profiles import job_on, load

if TYPE_CHECKING:
    from openrecycle.agent.launcher.launch import Launcher
    from openrecycle.agent.nodes.server import Succession

GRID = (3, 4, 6)
"""Pipelines, stages and micro-batches of a job that says nothing else."""
INCOMPLETE = 3
"""Exit status of a job that trained to its end, but whose record lacks lines."""


@with_flags(leaves(TrainingOptions))
def launch(
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
    nodes: Annotated[int | None, typer.Option(help="Launchers of this job, one per node.")] = None,
    node_rank: Annotated[int | None, typer.Option(help="This one's number; 0 leads.")] = None,
    lead: Annotated[str | None, typer.Option(help="HOST:PORT of node 0, as every node reaches it.")] = None,
    node_address: Annotated[
        str | None,
        typer.Option(
            help="Address at which other nodes reach this node's workers. Default: the one that leads to node 0."
        ),
    ] = None,
    *,
    given: dict[str, Any],
) -> None:
    """Starts a job of PIPELINES x STAGES worker processes, here or on several nodes, and trains through failures."""
    with sentences():
        token = read_token(token_file)
        role = role_of(os.environ, nodes, node_rank, lead)
        if role is not None:
            check_token(role, token)
        record = Path(given["record"]) if given.get("record") else None
        if record is not None:
            check_writable(record)
        stopped: list[int] = []
        printing = _Printing()
        terminal = Delivery(printing, "printing", printing.remark)

        def say(text: str) -> None:
            terminal({"warning": text})

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
                source = NamedWorkload(workload, json_object(workload_options))
                options.check()
                try:
                    launcher = make_launcher(options, source, listener, say, role=role)
                except LedElsewhere as led:
                    say(str(led))
                    elsewhere = led.lead
            earlier: Iterable[bytes] = ()
            if launcher is None:
                assert role is not None
                succession = serve_node(role, token, node_address, NamedWorkload(workload), stopped, elsewhere)
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
        sizes = (default if size is None else size for size, default in zip(grid, GRID, strict=True))
        return planning.job(Job.uniform(*sizes))
    document = load(profile)
    job = job_on(document, *grid)
    return planning.job(Job(job.pipelines, job.stages, job.micro_batches), document)


class _Printing:
    """Shows the record's lines, in words: iterations on standard output, what is out of the ordinary on standard
    error. One that is closed, or full, is said on the other, and left alone from then on."""

    def __call__(self, line: Line) -> None:
        if is_remark(line):
            self.remark(sentence_of(line))
        elif "gradient_norm" not in line:  # a line per iteration is enough
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


TIMEOUT_SECONDS = 600.0


def serve_node(
    role: NodeRole,
    token: str | None,
    address: str | None,
    workload: WorkloadSource,
    stopped: list[int],
    lead: tuple[str, int] | None,
) -> Succession | None:
    """Until the job is over, or this node is to lead; ends the program with exit status 1 when no lead can be had.

    workload: what the lead will most likely ask for; its modules are imported meanwhile. stopped: gets the numbers of
    signals that came. lead: where it listens, if not where `role` says.
    """
    start_worker_server(preload(workload))
    from openrecycle.agent.nodes.role import find_lead
    from openrecycle.agent.nodes.server import LeadLost, NodeServer

    front = (role.host, role.port)
    if role.store is not None and not role.leads:
        try:
            front = find_lead(role.store)
        except RuntimeError:
            raise InputError("--lead", None, f"HOST:PORT, since torchrun's store at {role.host} names none") from None
    say = partial(typer.echo, err=True)
    server = NodeServer(role.rank, role.nodes, front, token, address, say, lead)

    def stop(number: int, _frame: object) -> None:
        stopped.append(number)
        server.stop(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        ended = server.run(TIMEOUT_SECONDS)
    except LeadLost as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(128 + stopped[0] if stopped else 1) from None
    if not isinstance(ended, str):
        return ended
    typer.echo(ended)
    return None
