"""Which workers form a process group in a job that keeps its own loop (Reporter.schedule), and how state is handed over
in it. torch is imported only when something is handed over, since a Reporter needs no torch."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openrecycle.planner.jobs.job import Worker

_MET = "openrecycle/met"
_MEETING_SECONDS = 0.05


class GroupLost(RuntimeError):
    """The process group can no longer be used: a worker is gone, or the job has other workers. Form a new group of the
    workers that `Reporter.membership` names. peer: the other end of the transfer that broke, where that is known."""

    def __init__(self, text: str, peer: Worker | None = None) -> None:
        super().__init__(text)
        self.peer = peer


@dataclass(frozen=True)
class Membership:
    """The workers that form the next process group.

    workers: their names, by rank. rank: this worker's. joining: the workers that are new, and take parameters,
    optimizer state and iteration from a worker of their stage. newest: returns the job's newest generation; raises
    RuntimeError if this worker is in none any more. sums: given None, returns the sums that go with this worker's state
    (see OwnLoop.kept); given sums, makes them this worker's.
    """

    generation: int
    workers: tuple[str, ...]
    rank: int
    joining: tuple[str, ...] = ()
    newest: Callable[[], int] = field(default=int, compare=False, repr=False)
    sums: Callable[[Any], Any] = field(default=lambda sums: None, compare=False, repr=False)

    def meet(self, store: Any, timeout: float = 600.0) -> None:
        """Waits until all these workers have come to `store`, a FileStore or TCPStore of torch, which must be a new one
        for each generation. After that `init_process_group(store=store, ...)` waits for nobody.

        Raises GroupLost as soon as the job goes on with other workers, and RuntimeError as soon as it is over or goes
        on without this one. In torch itself a process would wait for them until its time-out."""
        until = time.monotonic() + timeout
        here = store.add(_MET, 1)
        while here < len(self.workers):
            if self.newest() > self.generation:
                raise GroupLost(f"generation {self.generation} is superseded by {self.newest()}")
            if time.monotonic() > until:
                raise GroupLost(f"{here} of {len(self.workers)} workers of generation {self.generation} have met")
            time.sleep(_MEETING_SECONDS)
            here = store.add(_MET, 0)

    def hand_over(self, state: Any) -> Any:
        """Hands state over to the workers that are joining. All workers call it, in the process group of these workers.

        Returns `state`; on a worker that is joining, the state of a worker of its stage. state: tensors, numbers,
        texts, lists and dictionaries of these, such as a `state_dict`. It is sent in the format of torch.save, and
        reading it runs no code. Raises GroupLost, and RuntimeError where no worker of the stage has the state."""
        import torch
        import torch.distributed as dist

        try:
            if self.gives_to:
                written = io.BytesIO()
                torch.save((state, self.sums(None)), written)
                whole = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)
                for rank in self.gives_to:
                    dist.send(torch.tensor([whole.numel()]), rank)
                    dist.send(whole, rank)
            if (source := self.takes_from) is not None:
                size = torch.zeros(1, dtype=torch.int64)
                dist.recv(size, source)
                whole = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(whole, source)
                state, sums = torch.load(io.BytesIO(whole.numpy().tobytes()), weights_only=True)
                self.sums(sums)
                return state
        except RuntimeError as error:
            raise GroupLost(f"the hand-over of state broke: {error}") from error
        if self.worker in self.joining:
            raise RuntimeError(f"{self.worker} joins, and no living worker of its stage has its state")
        return state

    @property
    def takes_from(self) -> int | None:
        """The rank that this worker takes its state from; None: it has the state, or nobody has it."""
        return self._giver(self.worker) if self.worker in self.joining else None

    @property
    def gives_to(self) -> tuple[int, ...]:
        """The ranks that take their state from this worker."""
        return tuple(self.workers.index(name) for name in self.joining if self._giver(name) == self.rank)

    @property
    def worker(self) -> str:
        return self.workers[self.rank]

    def _giver(self, name: str) -> int | None:
        stage = Worker.parse(name).stage
        having = (i for i, other in enumerate(self.workers) if other not in self.joining)
        return next((i for i in having if Worker.parse(self.workers[i]).stage == stage), None)
