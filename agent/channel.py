"""The pipe between a worker and the launcher of its node: one JSON document per message, no pickle.

The launcher sends epochs and the end; the worker says what happened to it, each message with its
monotonic time, so that the launcher can put the times of all its workers on one clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from agent.protocol import Deployment
from planner.plan import Plan

Message = dict[str, Any]


def send(pipe: Connection, kind: str, **fields: Any) -> None:
    """Raises OSError (BrokenPipeError) when the other end is gone."""
    pipe.send_bytes(json.dumps({"kind": kind, "at": time.monotonic_ns(), **fields}).encode())


def receive(pipe: Connection) -> Message:
    """Raises EOFError or OSError when the other end is gone."""
    message: Message = json.loads(pipe.recv_bytes())
    return message


class WorkerChannel:
    """The worker's end. A thread reads the pipe; when the launcher dies, so does the worker.

    announced: called in that thread with the epoch of each new deployment (and with a number above
    all epochs when the job is over), before anybody else learns of it.
    """

    OVER = 2**53

    def __init__(self, pipe: Connection, announced: Callable[[int], None]) -> None:
        self._pipe = pipe
        self._announced = announced
        self._news = threading.Condition()
        self._deployment: Deployment | None = None
        self._plans: dict[str, Plan] = {}
        self._over = False
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name="launcher-pipe", daemon=True).start()

    @property
    def newest_epoch(self) -> int:
        if self._over:
            return self.OVER
        deployment = self._deployment
        return deployment.epoch if deployment else 0

    @property
    def over(self) -> bool:
        return self._over

    def say(self, kind: str, **fields: Any) -> None:
        # A launcher that is gone ends this process through the listening thread.
        with self._sending, contextlib.suppress(OSError):
            send(self._pipe, kind, **fields)

    def wait_for_epoch(self, after: int, timeout: float | None = None) -> tuple[Deployment, Plan] | None:
        """The newest deployment with an epoch above `after` and its plan; None when the job is over
        or `timeout` seconds have passed."""
        with self._news:
            self._news.wait_for(lambda: self.newest_epoch > after, timeout)
            if self._over or self._deployment is None or self._deployment.epoch <= after:
                return None
            return self._deployment, self._plans[self._deployment.plan_fingerprint]

    def _listen(self) -> None:
        while True:
            try:
                message = receive(self._pipe)
            except (EOFError, OSError):
                os._exit(1)  # orphaned: nobody would ever end this process
            with self._news:
                if message["kind"] == "deployment":
                    deployment = Deployment.model_validate(message["deployment"])
                    if deployment.plan_fingerprint not in self._plans:
                        self._plans[deployment.plan_fingerprint] = Plan.from_json(message["plan"])
                    self._deployment = deployment
                elif message["kind"] == "over":
                    self._over = True
                self._news.notify_all()
            self._announced(self.newest_epoch)
