"""Checkpoints beside the training: a copy at an iteration's boundary, written by a thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from openrecycle.agent.checkpoints.checkpoint import (
    CheckpointError,
    Identity,
    find,
    put_back_replaced,
    remove_unfinished,
    set_aside_later,
    whole_checkpoints,
    write_share,
)
from openrecycle.agent.config.options import Checkpoints
from openrecycle.agent.models.shares import Share, Writer
from openrecycle.planner.jobs.errors import InputError, in_a_line

TIMEOUT_SECONDS = 30.0
"""How long training waits for the checkpoint before to be written, when the next is to begin."""

IF_ANY = "if-any"
"""What to resume from where the same command begins a job and goes on with it, as schedulers of clusters repeat it."""


@dataclass(frozen=True)
class Origin:
    """Of a job that writes checkpoints. identity: of the job. resumed: the checkpoint it begins with, if any,
    and how many iterations are in it."""

    identity: Identity
    resumed: str | None = None
    resumed_at: int = 0


def prepare(options: Checkpoints, identity: Identity, iterations: int, say: Callable[[str], None]) -> Origin:
    """Finds and verifies what the job begins with. say: gets what the person should know of it.

    Raises InputError, also for a folder with checkpoints that nobody asked to resume from: they
    would be mixed with those of another run.
    """
    directory = options.folder
    assert directory is not None
    resume = options.resume
    put_back_replaced(directory)
    if resume in (None, IF_ANY):
        try:
            there = whole_checkpoints(directory)
        except CheckpointError as error:
            raise options.refuse("directory", f"a folder without old checkpoints ({error})") from None
        except OSError as error:  # not taken for empty: the job would begin anew
            raise options.refuse("directory", f"a folder that can be read ({in_a_line(error)})") from None
        if there and resume is None:
            raise options.refuse(
                "directory",
                f"a folder without checkpoints, or `checkpoints.resume` newest to go on from iteration "
                f"{there[0].iteration}",
            )
        if not there:
            remove_unfinished(directory)
            return Origin(identity)
        resume = "newest-intact"
    try:
        found = find(directory, str(resume))
    except CheckpointError as error:
        raise options.refuse("resume", f"a whole checkpoint ({error})") from None
    except OSError as error:
        raise options.refuse("directory", f"a folder that can be read ({in_a_line(error)})") from None
    was = found.identity
    layers = "job.stages" if identity.layers == identity.stages else "layers"
    for field, mine, theirs in ((layers, identity.layers, was.layers), ("seed", identity.seed, was.seed)):
        if mine != theirs:
            raise InputError(field, mine, f"{theirs}, as in the checkpoint {found.path}")
    # The same command once more: its weights may be what is missing.
    done = found.iteration == iterations and options.resume == IF_ANY
    if found.iteration >= iterations and not done:
        raise InputError("iterations", iterations, f"more than the {found.iteration} that {found.path} holds")
    remove_unfinished(directory)
    if done:
        say(f"all {iterations} iterations are in {found.path}: nothing is left to train")
    else:
        say(f"resumes after iteration {found.iteration - 1} from {found.path}")
    for name in set_aside_later(directory, found.iteration):
        say(f"note: a later checkpoint is now called {name}")
    if (identity.pipelines, identity.micro_batches) != (was.pipelines, was.micro_batches):
        say(
            f"note: {was.pipelines} x {was.micro_batches} micro-batches an iteration until now, {identity.pipelines} x "
            f"{identity.micro_batches} from here: the numbers differ from those of an unbroken run"
        )
    for name, value in identity.recipe.items():
        if name in was.recipe and was.recipe[name] != value:
            say(f"note: {name} was {was.recipe[name]} and is {value} from here")
    return Origin(identity, str(found.path), found.iteration)


class Trained(Protocol):
    """What a copy is taken of: an agent.stages.optimizer.StageOptimizer."""

    committed: int

    @property
    def version(self) -> tuple[int, float | None]: ...

    def share(self, writer: Writer) -> Share: ...


@dataclass(frozen=True)
class _Copy:
    iteration: int
    attempt: int
    layers: int
    share: Share


class Checkpointer:
    """One process's share. Nothing that goes wrong with the disk ends the training; one that is slower
    than checkpoints are wanted holds it up, for TIMEOUT_SECONDS at most.

    said: called, also from the writing thread, with (iteration, None) when a checkpoint has become
    whole by this worker's share, and with (iteration, sentence) when it has not been written.
    interrupted: asked while waiting; training has something more urgent to do then.
    """

    def __init__(
        self,
        options: Checkpoints,
        origin: Origin,
        stage: int,
        layers: int,
        said: Callable[[int, str | None], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._options, self._origin, self._stage = options, origin, stage
        self.layers = layers
        self._said, self._interrupted = said, interrupted
        self._copy: _Copy | None = None
        self._taken: tuple[int, float | None, int] | None = None
        self._thread: threading.Thread | None = None

    def boundary(self, optimizer: Trained, attempt: int, writer: Writer | None, *, last: bool = False) -> None:
        """Between two iterations. writer: as which this process writes; None: it does not. attempt: the generation.
        last: will there be no other?

        The copy taken here is written only once the next step has been taken: until then the last
        one may be overturned, or undone by a death elsewhere.
        """
        committed = optimizer.committed
        # Once of the same values: it may be due, and turn out to be the last.
        values = (*optimizer.version, attempt)
        if values == self._taken:
            return
        self._write_if_final(committed)
        self._copy = None
        if (last or self.due(committed)) and committed > self._origin.resumed_at and writer is not None:
            self._taken = values
            self._copy = _Copy(committed, attempt, self.layers, optimizer.share(writer))

    def due(self, committed: int) -> bool:
        """Is there to be a checkpoint of so many iterations?"""
        return committed % self._options.every == 0

    def finish(self) -> None:
        """Of a job without further iterations, its last step settled: writes what there is, and waits."""
        self._wait(float("inf"))  # nobody trains who could be held up
        self._write_if_final(math.inf)
        self._wait(float("inf"))

    def _write_if_final(self, committed: float) -> None:
        ready, self._copy = self._copy, None
        if ready is None or ready.iteration >= committed:
            return
        # All workers wait alike: were one to leave out this checkpoint and the next worker the next
        # one, none would ever be whole.
        if not self._wait(TIMEOUT_SECONDS):
            if not self._interrupted():
                self._said(
                    ready.iteration,
                    "the one before is still being written; more iterations between checkpoints would help",
                )
            return
        self._thread = threading.Thread(target=self._write, args=(ready,), name="checkpoint", daemon=True)
        self._thread.start()

    def _wait(self, seconds: float) -> bool:
        """For the writing thread; returns whether it is done."""
        until = time.monotonic() + seconds
        while self._thread is not None and self._thread.is_alive():
            if self._interrupted() or time.monotonic() > until:
                return False
            self._thread.join(0.02)
        return True

    def _write(self, copy: _Copy) -> None:
        options, folder = self._options, self._options.folder
        assert folder is not None
        try:
            identity, attempt = self._origin.identity, copy.attempt
            whole = write_share(folder, copy.share, self._stage, copy.layers, identity, attempt, options.keep)
        except (CheckpointError, OSError) as error:
            self._said(copy.iteration, str(error))
        else:
            if whole:
                self._said(copy.iteration, None)
