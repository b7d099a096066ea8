"""A real job with a real console, whose workers are killed, stopped, asked to leave and started again, one change
after the other, while something else goes wrong all the time.

The launcher runs in this process, in a thread; workers and console are processes of their own. What happens follows
from the seed; the iterations that may run meanwhile are counted out (gated.py): as many as a change of generations
needs, however long the console takes to hear of it. No run depends on its speed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import requests

from openrecycle.agent.config.options import Console, Planning, Timeouts, TrainingOptions
from openrecycle.agent.config.options import Faults as FaultOptions
from openrecycle.agent.jobs.start import make_launcher
from openrecycle.agent.launcher.launch import Launcher
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.planner.jobs.job import Job
from tests.agent.consoles import until
from tests.agent.local_jobs import TINY
from tests.app.console_server import ConsoleServer
from tests.chaos.faulty_network import FaultyNetwork
from tests.chaos.gated import Gate

PIPELINES, STAGES, MICRO_BATCHES = 3, 2, 3
NAMES = [f"W{p}_{s}" for p in range(PIPELINES) for s in range(STAGES)]
DEAD_SECONDS = 6
FAILURE_TIMEOUTS = ("--heartbeat", "0.5", "--suspect", "3", "--dead", str(DEAD_SECONDS))
PER_CHANGE, SPARE = 6, 12
"""Iterations that one change may take on average, with those around it; and those that none needs."""
TIMEOUT = 120.0
"""Seconds without anything of what a test waits for."""
LAST_EVENTS = 30
"""Lines of the event feed that are shown of a job that got stuck."""


DEEDS = ("kill",) * 7 + ("drain",) * 2 + ("stop",)


class Disturbance(Protocol):
    """Something that goes wrong, and is mended."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class ChaoticJob:
    """One job. Of what may happen to a worker each does as often as DEEDS names it; one that is out is started again.
    out: the workers that are out by now; deaths: how often each was lost; left: how often it was asked to go.
    pauses: seconds from each change until all who should be trained again, with the time that the console was away."""

    def __init__(
        self,
        server: ConsoleServer,
        network: FaultyNetwork,
        folder: Path,
        changes: int,
        *,
        seed: int,
        skew: float = 0.0,
    ) -> None:
        self.server, self.network, self.seed = server, network, seed
        self.random = random.Random(seed)
        self.iterations = PER_CHANGE * changes + SPARE
        self.gate = Gate(folder / "gate")
        self.gate.open(1)  # workers of the first stage look at the first data before they register
        self.out: set[str] = set()
        self.deaths: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.lines: list[dict[str, Any]] = []
        self.done: list[str] = []
        self.pauses: list[float] = []
        self._formed = 0
        self.error: BaseException | None = None
        options = TrainingOptions(
            job=Job(PIPELINES, STAGES, MICRO_BATCHES),
            iterations=self.iterations,
            planning=Planning(migrate=False),
            console=Console(url=network.url, demo=True),
            faults=FaultOptions(timeouts=Timeouts(op=600.0)),  # data that the gate keeps back is no hang
        )
        workload = NamedWorkload("tests.chaos.gated:GatedGpt", {**TINY, "gate": str(self.gate.path), "skew": skew})
        self.launcher: Launcher = make_launcher(options, workload, self.lines.append, lambda text: None)
        self._thread = threading.Thread(target=self._run, name="launcher", daemon=True)
        self.job_id = ""

    def begin(self) -> None:
        """Until all train."""
        self._thread.start()
        self.job_id = str(self.ask(lambda: self.read()["jobs"], "a job")[0]["job_id"])
        self.settle(0)

    def _run(self) -> None:
        try:
            self.launcher.run()
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        self.launcher.stop(signal.SIGTERM)
        self.gate.open(self.iterations)
        if self._thread.is_alive():
            self._thread.join(60)

    # -- what is known ------------------------------------------------------------------------

    def read(self, tail: str = "") -> Any:
        """What the console says of the job, straight from it."""
        answer = self.server.get(f"/jobs/{self.job_id}{tail}".rstrip("/"))
        answer.raise_for_status()
        return answer.json()

    def book(self, tail: str) -> Any:
        """As `read`, on a machine that may have no port left for a moment."""
        return self.ask(lambda: self.read(tail), f"the console to show {tail}")

    def ask(self, condition: Callable[[], Any], what: str) -> Any:
        def alive() -> Any:
            if self.error is not None:
                raise AssertionError(f"seed {self.seed}: the job ended while the test waited for {what}: {self.error}")
            return condition()

        try:
            return until(alive, what, TIMEOUT)
        except AssertionError as error:
            raise AssertionError(f"seed {self.seed}, after {self.done[-5:]}: {error}; {self._situation()}") from None

    def _situation(self) -> str:
        """What the console says, who is out though nothing was done to them, and what happened last."""
        try:
            failed = set(self.read("/deployment?after=0")["failed"])
            unasked, still_in = sorted(failed - self.out), sorted(self.out - failed)
            events = [f"{row['seq']} {row['text']}" for row in self.read("/events?limit=5000")["events"][-LAST_EVENTS:]]
            said = [self.read()["sentence"], f"generation {self.generation} here, {self.committed} iterations"]
        except (requests.RequestException, LookupError) as unreachable:
            return f"the console does not say more ({type(unreachable).__name__})"
        if unasked:
            said.append(f"{', '.join(unasked)} out, and nothing was done to them")
        if still_in:
            said.append(f"{', '.join(still_in)} in, and should be out")
        return "; ".join([*said, "last events:"]) + "\n  " + "\n  ".join(events)

    @property
    def committed(self) -> int:
        return sum("iteration" in line for line in self.lines)

    @property
    def generation(self) -> int:
        """The newest one that the launcher has taken up."""
        deployed = self.launcher.deployed
        return deployed.deployment.generation if deployed else 0

    @property
    def summary(self) -> str:
        """What was done to it, in one line."""
        deeds = Counter(deed.split()[0] for deed in self.done)
        text = ", ".join(f"{count} x {deed}" for deed, count in sorted(deeds.items()))
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.network.counts.items()))
        pauses = sorted(self.pauses)
        return (
            f"{len(self.done)} changes ({text}), generation {self.generation}, {self.committed} iterations, requests: "
            f"{faults or 'all well'}; pause {pauses[len(pauses) // 2]:.1f} s (median), {pauses[-1]:.1f} s (longest)"
        )

    # -- one change after the other -----------------------------------------------------------

    def change(self, disturbance: Disturbance | None = None) -> None:
        """One random change of who is in the job, and the job trains again. disturbance: falls into it."""
        before, begin = self.generation, time.monotonic()
        self.gate.open(self.committed + self.random.randint(1, 3))
        time.sleep(self.random.uniform(0.0, 0.05))  # anywhere in an iteration, or between two
        deed, worker = self._choose()
        self.done.append(f"{deed} {worker}")
        operators = deed in ("drain", "start")  # who need a console
        if disturbance is not None and not operators:
            disturbance.begin()
        getattr(self, f"_{deed}")(worker)
        if disturbance is not None:
            if operators:
                disturbance.begin()
            time.sleep(self.random.uniform(0.0, 0.5))
            disturbance.end()
        self.settle(before)
        self.pauses.append(time.monotonic() - begin)

    def settle(self, before: int) -> None:
        """Until all who should be are in the newest generation, above `before`, and train."""

        def settled() -> bool:
            if self.generation > before:
                self._let_train()
            if self.generation <= before or self.read()["state"] != "running":
                return False
            return set(self.read("/deployment?after=0")["failed"]) == self.out

        self.ask(settled, f"all but {sorted(self.out)} to train")
        assert self.committed < self.iterations - PER_CHANGE, f"seed {self.seed}: the changes took too many iterations"

    def _let_train(self) -> None:
        """Until the newest generation is formed, whatever its members have to finish first; then one iteration in
        it."""
        record = self.launcher.record
        generation = record.generation
        if self._formed == generation:
            return
        formed = record.formed_by_all
        foremost = record.newest
        # A worker that is held up at the gate can't leave for another generation: real data comes in the end.
        if formed or foremost >= self.gate.open_for:
            self.gate.open(foremost + 1)
        if formed:
            self._formed = generation

    def _choose(self) -> tuple[str, str]:
        """Never the last worker of a stage."""

        def left(stage: str) -> int:
            return sum(n.endswith(stage) and n not in self.out for n in NAMES)

        spare = [n for n in NAMES if n not in self.out and left(n[-2:]) > 1]
        if self.out and (not spare or self.random.random() < 0.45):
            return "start", self.random.choice(sorted(self.out))
        return self.random.choice(DEEDS), self.random.choice(spare)

    def _kill(self, worker: str) -> None:
        self._end(worker, signal.SIGKILL)

    def _stop(self, worker: str) -> None:
        self._end(worker, signal.SIGSTOP)

    def _end(self, worker: str, number: int) -> None:
        os.kill(self.launcher.pids[worker], number)
        self.out.add(worker)
        self.deaths[worker] += 1

    def _drain(self, worker: str) -> None:
        self._operate(worker, "drain")
        self.out.add(worker)
        self.left[worker] += 1

    def _start(self, worker: str) -> None:
        self._operate(worker, "restart")
        self.out.discard(worker)

    def _operate(self, worker: str, action: str) -> None:
        """As an operator at the page, who tries again while the console does not answer or is not ready for it."""
        path = f"/jobs/{self.job_id}/workers/{worker}/{action}"
        self.ask(lambda: self.server.post(path, {"actor": "ada"}).status_code < 400, f"{worker} to be told: {action}")

    # -- afterwards ---------------------------------------------------------------------------

    def finish(self) -> None:
        """Runs to its end."""
        self.gate.open(self.iterations)
        seen = -1

        def went_on() -> bool:
            return self.committed > seen

        while seen < self.iterations:
            self.ask(went_on, f"iteration {seen + 1}")
            seen = self.committed
        self.ask(lambda: not self._thread.is_alive(), "the end of the job")
        self.ask(lambda: self.read()["committed"] == self.iterations, "the console to have all iterations")

    @property
    def losses(self) -> list[str]:
        return [line["loss"] for line in self.lines if "iteration" in line]

    @property
    def final(self) -> dict[str, Any]:
        return next(line["final"] for line in self.lines if "final" in line)
