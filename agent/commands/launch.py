"""`openrecycle train`: trains on this machine, through failures."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from openrecycle.agent.commands.node import serve_node
from openrecycle.agent.commands.shared import (
    FirstOpTimeout,
    FormTimeout,
    GroupTimeout,
    OpTimeout,
    SilenceTimeout,
    StartTimeout,
    TransferTimeout,
    json_object,
    read_token,
    sentences,
)
from openrecycle.agent.delivery import Delivery, Line, RecordFile
from openrecycle.agent.devices import Platform
from openrecycle.agent.faults import Kill, Rejoin, Slow
from openrecycle.agent.nodes.role import check_token, role_of
from openrecycle.agent.recipe import CheckpointWish, HandOver, Recipe
from openrecycle.agent.record_words import is_remark, sentence_of
from openrecycle.agent.start import (
    BY_PROFILE,
    StartOptions,
    check_writable,
    make_launcher,
    parse_bytes,
    parse_pace,
    with_capacity,
)
from openrecycle.agent.timeouts import Timeouts
from openrecycle.agent.workload import NamedWorkload
from openrecycle.planner.errors import InputError
from openrecycle.planner.job import Job, MemoryLimit, Technique
from openrecycle.planner.profiles import job_on, load

GRID = (3, 4, 6)
"""Pipelines, stages and micro-batches of a job that says nothing else."""
INCOMPLETE = 3
"""Exit status of a job that trained to its end, but whose record lacks lines."""


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
    iterations: Annotated[int, typer.Option(help="Iterations to commit.")] = 30,
    record: Annotated[Path | None, typer.Option(help="JSON-lines file: losses, failures, final hash.")] = None,
    console: Annotated[
        str | None,
        typer.Option(
            envvar="OPENRECYCLE_CONSOLE",
            help="Address of a console, such as http://127.0.0.1:8501; its standby's after a comma.",
        ),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="The console's token (or OPENRECYCLE_TOKEN).")] = None,
    kill: Annotated[list[str] | None, typer.Option(help="W1_2@10:F3: SIGKILL before that op. Repeatable.")] = None,
    rejoin: Annotated[list[str] | None, typer.Option(help="W1_2@15: start it anew after that iteration.")] = None,
    slow: Annotated[
        list[str] | None, typer.Option(help="W1_2@10:2: from that iteration its paced ops take twice as long.")
    ] = None,
    technique: Annotated[str, typer.Option(help="fault-free, adaptive, decoupled or staggered.")] = "staggered",
    memory: Annotated[
        str, typer.Option(help="1f1b, uniform, none, a number of micro-batches, or the profile's bytes.")
    ] = "uniform",
    pace: Annotated[
        str | None, typer.Option(help="F=40ms,I=40ms,W=40ms: stretch each op to this; profile: to what --profile says.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Op times to plan with: a file of `profile`, a shipped profile's name, or the document of a job."
        ),
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(help="Memory of one worker, such as 80GiB, where the profile does not say it.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of parameters, data and dropout.")] = 0,
    name: Annotated[str, typer.Option(help="What the console calls the job.")] = "gpt",
    weights: Annotated[Path | None, typer.Option(help="Folder for the trained weights, one file per stage.")] = None,
    demo: Annotated[bool, typer.Option(help="Let the console kill and restart these processes.")] = False,
    mode: Annotated[str, typer.Option(help="deterministic (same bits after any failure) or fast.")] = "deterministic",
    autocast: Annotated[str | None, typer.Option(help="bf16: run forwards under torch.autocast.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Largest global norm of the gradients.")] = None,
    non_finite: Annotated[str, typer.Option(help="On a NaN or infinite gradient: skip (the step) or stop.")] = "skip",
    on_bad_sample: Annotated[
        str,
        typer.Option(help="On a micro-batch that raises on every worker: halt (the job) or skip (the micro-batch)."),
    ] = "halt",
    bad_sample_limit: Annotated[int, typer.Option(help="Micro-batches that may be skipped so; one more halts.")] = 100,
    device: Annotated[str, typer.Option(help="cpu, or cuda: a GPU of its own for every worker, over NCCL.")] = "cpu",
    transport: Annotated[
        str | None, typer.Option(help="How messages find their receives: tagged (on CPUs), or ordered (as NCCL needs).")
    ] = None,
    synchronous: Annotated[bool, typer.Option(help="No stage steps before the global checks are known.")] = False,
    keep_finished: Annotated[
        bool, typer.Option(help="After a death, don't run again what survivors have finished.")
    ] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for checkpoints, which all workers reach.")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Iterations from one checkpoint to the next.")] = 100,
    checkpoint_keep: Annotated[int, typer.Option(help="Newest checkpoints that stay.")] = 3,
    resume: Annotated[
        str | None, typer.Option(help="Of --checkpoint: newest, newest-intact (passes over damaged) or an iteration.")
    ] = None,
    migrate: Annotated[
        bool | None,
        typer.Option(
            "--migrate/--no-migrate",
            help="May workers change their stage to shorten the plan? By default where a console decides, if it pays.",
        ),
    ] = None,
    form_timeout: FormTimeout = Timeouts.form,
    transfer_timeout: TransferTimeout = Timeouts.transfer,
    group_timeout: GroupTimeout = Timeouts.group,
    silence_timeout: SilenceTimeout = Timeouts.silence,
    start_timeout: StartTimeout = Timeouts.start,
    op_timeout: OpTimeout = Timeouts.op,
    first_op_timeout: FirstOpTimeout = Timeouts.first_op,
    hand_over_rate: Annotated[
        str | None,
        typer.Option(help="Bytes a second that a worker gives of its state to one that joins: 50MB."),
    ] = None,
    compare_every: Annotated[
        int, typer.Option(help="Iterations after which a stage's workers compare their parameters; 0: at the end.")
    ] = 100,
    nodes: Annotated[int | None, typer.Option(help="Launchers of this job, one per node.")] = None,
    node_rank: Annotated[int | None, typer.Option(help="This one's number; 0 leads.")] = None,
    lead: Annotated[str | None, typer.Option(help="HOST:PORT of node 0, as every node reaches it.")] = None,
    node_address: Annotated[
        str | None, typer.Option(help="Of this node's workers, if not what leads to node 0.")
    ] = None,
    workload: Annotated[
        str, typer.Option(help="module:factory of what is trained.")
    ] = "openrecycle.agent.examples.gpt:Gpt",
    workload_options: Annotated[str, typer.Option(help="JSON object with the factory's arguments.")] = "{}",
) -> None:
    """Starts a job of PIPELINES x STAGES worker processes, here or on several nodes, and trains through failures."""
    with sentences():
        token = read_token(token_file)
        role = role_of(os.environ, nodes, node_rank, lead)
        if role is not None:
            check_token(role, token)
            if not role.leads:
                serve_node(role, token, node_address, NamedWorkload(workload))
                return
        if resume is not None and checkpoint is None:
            raise InputError("--resume", resume, "--checkpoint too, with the folder to resume from")
        by_profile = pace == BY_PROFILE
        paced = {} if by_profile else parse_pace(pace)
        job = with_capacity(_job((pipelines, stages, micro_batches), profile, paced, by_profile), capacity)
        options = StartOptions(
            job=job,
            iterations=iterations,
            workload=NamedWorkload(workload, json_object(workload_options)),
            seed=seed,
            technique=Technique.of(technique),
            memory=MemoryLimit.parse(memory),
            pace=paced,
            kills=tuple(Kill.parse(text, job) for text in kill or ()),
            rejoins=tuple(Rejoin.parse(text, job) for text in rejoin or ()),
            recipe=Recipe(
                *(mode, autocast, clip_norm, non_finite, not synchronous, keep_finished),  # type: ignore[arg-type]
                on_bad_sample=on_bad_sample,  # type: ignore[arg-type]
                bad_sample_limit=bad_sample_limit,
            ),
            console=console,
            token=token,
            name=name,
            weights=None if weights is None else str(weights),
            checkpoints=CheckpointWish(str(checkpoint), checkpoint_every, checkpoint_keep, resume)
            if checkpoint is not None
            else None,
            demo=demo,
            role=role,
            migrate=migrate,
            platform=Platform.of(device, transport),
            paced_by_profile=by_profile,
            slow=tuple(Slow.parse(text, job) for text in slow or ()),
            timeouts=Timeouts(
                form=form_timeout,
                transfer=transfer_timeout,
                group=group_timeout,
                silence=silence_timeout,
                start=start_timeout,
                op=op_timeout,
                first_op=first_op_timeout,
            ),
            hand_over=HandOver()
            if hand_over_rate is None
            else HandOver(rate=parse_bytes(hand_over_rate, field="--hand-over-rate")),
            compare_every=compare_every,
        )
        if record is not None:
            check_writable(record, field="--record")

        stopped: list[int] = []
        printing = _Printing()
        terminal = Delivery(printing, "printing", printing.remark)

        def say(text: str) -> None:
            terminal({"warning": text})

        written = _Written(record, say)

        def listener(line: Line) -> None:
            written(line)
            terminal(line)

        status, last = 0, ""
        try:
            launcher = make_launcher(options, listener, say)
            # Only now, so that bad input has not waited for torch.
            from openrecycle.agent.launch import JobFailed, Stopped

            def stop(number: int, _frame: object) -> None:
                stopped.append(number)
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
            missing = written.close(lambda: bool(stopped))
            if missing:
                say(f"the record {record} is not whole: {missing} lines are missing")
            told = terminal.close(lambda: bool(stopped))
        if not told:
            os._exit(status or 128 + stopped[0])  # standard output takes nothing, and Python would wait for it
        if last:
            printing.show(last)
        if status or missing:
            raise typer.Exit(status or INCOMPLETE)


def _job(
    grid: tuple[int | None, int | None, int | None], profile: Path | None, paced: dict[str, float], by_profile: bool
) -> Job:
    """grid: pipelines, stages, micro-batches, where they are given. Raises InputError."""
    if profile is None:
        if by_profile:
            raise InputError("--pace", BY_PROFILE, "--profile too, which says how long the ops take")
        sizes = (default if size is None else size for size, default in zip(grid, GRID, strict=True))
        return Job.uniform(*sizes, durations=paced, time_unit="ms" if paced else "slot")
    if paced:
        raise InputError("--pace", paced, f"{BY_PROFILE}, or nothing, beside --profile, which has the op times")
    return job_on(load(profile), *grid)


class _Written:
    """The record's file, where there is one."""

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self._delivery: Delivery | None = None
        if path is not None:
            try:
                self._file = RecordFile(path, say)
            except OSError as error:
                raise InputError("--record", str(path), f"a file that can be written ({error.strerror})") from None
            self._delivery = Delivery(self._file, f"the record {path}", say)

    def __call__(self, line: Line) -> None:
        if self._delivery is not None:
            self._delivery(line)

    def close(self, hurried: Callable[[], bool]) -> int:
        """Returns how many lines the file lacks."""
        if self._delivery is None:
            return 0
        self._file.end()
        whole = self._delivery.close(hurried)
        return self._file.lost + self._delivery.left_out + (not whole)


class _Printing:
    """Shows the record's lines, in words: iterations on standard output, what is out of the ordinary on standard
    error. One that is closed, or full, is said on the other, and left alone from then on."""

    def __call__(self, line: Line) -> None:
        if is_remark(line):
            self.remark(sentence_of(line))
        else:
            self.show(sentence_of(line))

    def show(self, text: str) -> None:
        try:
            typer.echo(text)
        except OSError as error:
            _leave(sys.stdout)
            self.remark(f"warning: nothing can be printed any more ({error.strerror}); training goes on")

    def remark(self, text: str) -> None:
        try:
            typer.echo(text, err=True)
        except OSError:
            _leave(sys.stderr)


def _leave(stream: Any) -> None:
    """What is written to it goes nowhere, from now on and when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
