"""What a worker's thread has given its device to do, op by op, and when each op has ended there.

On the CPU an op has ended when its calls return. A GPU goes on with what it was given while the host gives it more: so
that it never waits for the host, the host runs one op ahead, and waits for an event, the end of the op before. Never
more than that, so that what a report says of this worker is true to an op, and what is in hand when an iteration is
left is short.

Why that changes no bit, and no recovery:
- All ops are in one stream, in the order of the plan, whenever the host gives them to it.
- Nothing that comes from a peer is given to an op before the host has seen that it came, and that no cancel came before
  it (agent.transport.nccl); nor does an op go beyond a collective of its worker's ranks whose end the host has not seen
  (agent.transport.ranks). So an op that is queued waits for nobody: it ends by itself, whoever has died.
- What is sent or summed over NCCL waits for its op on the device; what goes by way of the host, and every look of the
  host at a number, waits for all ops before it.
- Who leaves an iteration first ends what waits for peers, and then waits for the device (`forget`): nobody writes to a
  sum, a parameter or a buffer any more when it is undone, or given to somebody else. Ops of the next iteration come
  behind in the same stream.
- A step is taken with the host at its side: its end is waited for.

NOT RUN on a GPU; the order of waits is tested with stand-ins for its events.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from openrecycle.agent.config.pacing import PacedDevice
from openrecycle.agent.monitoring.liveness import OpProgress
from openrecycle.planner.plans.schedule import MicroBatch

AHEAD = 1
"""Ops that may be queued behind the one that the device is at."""
_GLANCE_SECONDS = 2e-5


class OpQueue:
    """Of a device whose calls return when their work is done.

    pace: stretches ops. ended: is told of each op's kind, when it ended on this process's monotonic clock (NaN: nobody
    has asked for that), and the seconds that it took on the device; in order. now: that clock.
    """

    def __init__(
        self, pace: PacedDevice, ended: Callable[[str, float, float], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._pace, self._ended, self._now = pace, ended, now

    def clock(self) -> None:
        """From here on, it is asked when ops end. Nothing is queued."""

    def begin(self) -> float:
        """The next op's work begins. Returns the time."""
        return self._now()

    def end(self, kind: str, key: MicroBatch, started: float) -> None:
        """All its work has been given to the device. started: what `begin` returned."""
        self.finish(kind, started)

    def finish(self, kind: str, started: float) -> None:
        """The same; returns when it has ended. started: on the monotonic clock."""
        seconds = self._pace.finish(kind, started)
        self._ended(kind, self._pace.ended, seconds)

    def wait_for(self, arrived: Callable[[], bool]) -> None:
        """Before a wait for a peer: returns as soon as `arrived`, or when all ops have ended. Until then it is them
        that this worker waits for."""

    def drain(self) -> None:
        """Returns when all ops have ended."""

    def forget(self) -> None:
        """The same, of ops that are of no use."""


@dataclass(frozen=True)
class _Queued:
    kind: str
    key: MicroBatch
    began: Any
    ended: Any


class DeviceOpQueue(OpQueue):
    """Of a GPU. event: makes one that has been recorded in the stream of the ops (`synchronize`, `query`,
    `elapsed_time` to a later one, in ms). progress: is told what the host waits for."""

    def __init__(
        self,
        pace: PacedDevice,
        ended: Callable[[str, float, float], None],
        progress: OpProgress,
        event: Callable[[], Any],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(pace, ended, now)
        self._progress, self._event = progress, event
        self._queued: deque[_Queued] = deque()
        self._began: Any = None
        self._clock: tuple[Any, float] | None = None

    def clock(self) -> None:
        event = self._event()
        event.synchronize()
        self._clock = event, self._now()

    def begin(self) -> float:
        self._began = self._event()
        return super().begin()

    def end(self, kind: str, key: MicroBatch, started: float) -> None:
        if self._pace.paces(kind):
            self.finish(kind, started)
            return
        self._pace.waited()
        self._queued.append(_Queued(kind, key, self._began, self._event()))
        self._retire(AHEAD)

    def finish(self, kind: str, started: float) -> None:
        end = self._event()
        if self._queued:
            self.drain()
            started = max(started, self._now())  # the device came to it only now
        end.synchronize()
        super().finish(kind, started)

    def wait_for(self, arrived: Callable[[], bool]) -> None:
        while self._queued and not arrived():
            op = self._queued[0]
            self._progress.at(op.kind, op.key)
            while not (ended := op.ended.query()) and not arrived():
                time.sleep(_GLANCE_SECONDS)
            if ended:
                self._retire(len(self._queued) - 1)

    def drain(self) -> None:
        self._retire(0)

    def forget(self) -> None:
        self._queued.clear()
        self._event().synchronize()

    def _retire(self, keep: int) -> None:
        """Waits for the ends of all but the last so many."""
        while len(self._queued) > keep:
            op = self._queued[0]
            self._progress.at(op.kind, op.key)
            op.ended.synchronize()
            self._queued.popleft()
            at = math.nan
            if self._clock is not None:
                since, then = self._clock
                at = then + since.elapsed_time(op.ended) / 1000
            self._ended(op.kind, at, op.began.elapsed_time(op.ended) / 1000)


def op_queue(
    device: torch.device, pace: PacedDevice, ended: Callable[[str, float, float], None], progress: OpProgress
) -> OpQueue:
    """That of this thread's ops on `device`."""
    if device.type != "cuda":
        return OpQueue(pace, ended)

    def event() -> Any:
        # Blocking: a thread that spins would take the processor from those that report and cancel.
        made: Any = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        made.record(torch.cuda.current_stream(device))
        return made

    return DeviceOpQueue(pace, ended, progress, event)
