"""The example's model, which hangs once: `--workload tests.agent.hanging:Hanging` in its data loader, and
`tests.agent.hanging:SlowForward` in its forward."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from openrecycle.agent.examples import tensor_parallel
from openrecycle.agent.examples.gpt import Gpt


class Hanging(Gpt):
    """once: a file. Whoever loads the data of that iteration and pipeline takes it away and never comes back; when it
    is gone, nobody hangs any more."""

    def __init__(self, once: str, iteration: int, pipeline: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._once, self._where = Path(once), (iteration, pipeline)

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        if (iteration, pipeline) == self._where and self._once.exists():
            self._once.unlink()
            threading.Event().wait()
        return super().inputs(seed, iteration, pipeline, micro_batch)


class RankHanging(tensor_parallel.Gpt):
    """once: a file. The first rank that makes a layer (or is loaded with the workload, by `where`) takes it away,
    leaves its process number in `once`.pid, and never comes back; its other threads run."""

    def __init__(self, once: str, where: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._once, self._where = Path(once), where
        self._hang("workload")

    def build_layer(self, layer: int, layers: int, seed: int) -> Any:
        self._hang("layer")
        return super().build_layer(layer, layers, seed)

    def _hang(self, where: str) -> None:
        if where == self._where:
            with contextlib.suppress(FileNotFoundError):
                self._once.unlink()
                Path(f"{self._once}.pid").write_text(str(os.getpid()))
                threading.Event().wait()


class SlowData(Gpt):
    """All that load the first micro-batch of that iteration are at it for `seconds`, as on a disk that stalls."""

    def __init__(self, iteration: int, seconds: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._iteration, self._seconds = iteration, seconds

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        if (iteration, micro_batch) == (self._iteration, 0):
            time.sleep(self._seconds)
        return super().inputs(seed, iteration, pipeline, micro_batch)


class Stopped(Gpt):
    """record: the job's. Once it has a loss, whoever computes the next one in that pipeline stops its process by
    SIGSTOP, when it has written its number into `record`.pid. Nobody does so again."""

    def __init__(self, record: str, pipeline: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._record, self._pid, self._pipeline, self._at = Path(record), Path(f"{record}.pid"), pipeline, -1

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        self._at = pipeline
        return super().targets(seed, iteration, pipeline, micro_batch)

    def loss(self, output: Any, targets: Any) -> Any:
        # Not before: the launcher tries the model, too.
        if self._at == self._pipeline and not self._pid.exists() and '"loss"' in self._record.read_text():
            self._pid.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().loss(output, targets)


class SlowForward(Gpt):
    """once: a file. Whoever computes a loss of that iteration and pipeline takes it away and is at it for `seconds`
    (0: for ever). gil: it computes now and then all that time, and lets no other thread of its process run."""

    def __init__(
        self, once: str, iteration: int, pipeline: int, seconds: float = 0.0, gil: bool = False, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._once, self._where, self._seconds, self._gil = Path(once), (iteration, pipeline), seconds, gil
        self._at = (-1, -1)

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Any:
        self._at = iteration, pipeline
        return super().targets(seed, iteration, pipeline, micro_batch)

    def loss(self, output: Any, targets: Any) -> Any:
        if self._at == self._where and self._once.exists():
            self._once.unlink()
            self._linger()
        return super().loss(output, targets)

    def _linger(self) -> None:
        if not self._gil:
            threading.Event().wait(self._seconds or None)
            return
        interval = sys.getswitchinterval()
        sys.setswitchinterval(3600)
        until = time.monotonic() + (self._seconds or float("inf"))
        sleep = ctypes.PyDLL(None).usleep  # the lock is kept meanwhile
        while time.monotonic() < until:
            # A fifth of the time: processor time is what tells it from one that hangs.
            if time.monotonic() % 0.05 > 0.01:
                sleep(10_000)
        sys.setswitchinterval(interval)
