"""False deaths of a job that is held up again and again, and how soon a worker that hangs is out of it.

A real job of 3 x 4 workers with ops of 40 ms. At random moments everybody, the launcher alone or all workers stand
still for 5 to 120 s; a call of `on_iteration`, on the way of `ResilientTrainer`, takes 1 to 60 s; and for 1 to 60 s
nobody reads standard output, which is full and takes the iterations as `openrecycle train` prints them.
Meanwhile other processes burn processor time. Nobody should be lost, no generation formed without a death, and no line
missing. Then jobs in which one worker hangs in its forward: seconds until it is fenced, which should be 30 at most.

    python -m tests.benchmarks.bench_liveness --minutes 30 --burners 40
    python -m tests.benchmarks.bench_liveness --minutes 2 --longest 15 --held 10     # shorter
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any, NoReturn

from openrecycle.agent.cli import PrintedLines
from openrecycle.agent.jobs.callbacks import Callback
from openrecycle.agent.jobs.trainer import CalledBack
from openrecycle.agent.messages.client import Delivery
from openrecycle.agent.messages.protocol import Iteration
from openrecycle.agent.models.workload import NamedWorkload
from tests.agent.local_jobs import TINY, LocalJob
from tests.benchmarks.bench_false_alarms import burning
from tests.benchmarks.machine import describe

GRID: dict[str, Any] = {"pipelines": 3, "stages": 4, "micro_batches": 6}
PACE = 0.04
CALM = (5.0, 15.0)
"""Seconds between two suspensions; between two slow calls; and between two times in which nobody reads."""
Times = dict[str, list[float]]
"""What held the job up, and each time for how many seconds."""


class SlowCallback(Callback):
    """A user's on_iteration. Now and then a call takes 1 to `longest` seconds, until `over` is set."""

    def __init__(self, times: Times, longest: float, dice: random.Random) -> None:
        self._times, self._longest, self._dice = times["on_iteration"], longest, dice
        self._due = time.monotonic() + dice.uniform(*CALM)
        self.over = threading.Event()
        self.seen: list[int] = []

    def on_iteration(self, iteration: Iteration) -> None:
        self.seen.append(iteration.iteration)
        if (begin := time.monotonic()) >= self._due and not self.over.is_set():
            self.over.wait(self._dice.uniform(1, self._longest))
            self._times.append(time.monotonic() - begin)
            self._due = time.monotonic() + self._dice.uniform(*CALM)


class UnreadPipe:
    """A standard output. Now and then it is full, and nobody reads it for 1 to `longest` seconds, until `over` is set.
    read: everything that was printed, when it has been closed."""

    def __init__(self, times: Times, longest: float, dice: random.Random) -> None:
        self._times, self._longest, self._dice = times["standard output"], longest, dice
        self._out, into = os.pipe()
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 4096)
        self.stream: IO[str] = os.fdopen(into, "w", buffering=1)
        self.over = threading.Event()
        self.read = b""
        self._reader = threading.Thread(target=self._run, daemon=True)
        self._reader.start()

    def close(self) -> None:
        self.over.set()
        self.stream.close()
        self._reader.join()
        os.close(self._out)

    def _run(self) -> None:
        due = time.monotonic() + self._dice.uniform(*CALM)
        while some := os.read(self._out, 1 << 16):
            self.read += some
            if (begin := time.monotonic()) >= due and not self.over.is_set():
                self._fill()
                self.over.wait(self._dice.uniform(1, self._longest))
                self._times.append(time.monotonic() - begin)
                due = time.monotonic() + self._dice.uniform(*CALM)

    def _fill(self) -> None:
        """Empty lines, until not one more goes in: whoever prints now waits."""
        into = os.open(f"/proc/self/fd/{self.stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
        for size in (512, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(into, b"\n" * size)
        os.close(into)


def no_checkpoint(iteration: int) -> NoReturn:
    raise AssertionError("this job writes none")


def held_up(minutes: float, longest: float, held: float, seed: int) -> None:
    """Runs the job that long, and prints what came of it. longest, held: see the options of the same names."""
    dice = random.Random(seed)
    suspensions = ("everybody", "the launcher", "all workers")
    times: Times = {what: [] for what in (*suspensions, "on_iteration", "standard output")}
    pipe = UnreadPipe(times, held, random.Random(dice.random()))
    callback = SlowCallback(times, held, random.Random(dice.random()))
    said: list[str] = []
    callbacks = CalledBack([callback], "log", lambda: None, no_checkpoint)
    ways = (
        Delivery(callbacks, "on_iteration", said.append),
        Delivery(PrintedLines(), "printing", said.append),
    )
    end, due = [float("inf")], [float("inf")]
    generations: list[str] = []

    def hear(job: LocalJob, line: dict[str, Any]) -> None:
        for way in ways:
            way(line)

    def act(job: LocalJob, worker: str, message: dict[str, Any]) -> None:
        """In the launcher's own thread, which stands still while this sleeps."""
        now = time.monotonic()
        if due[0] == float("inf") and message["kind"] == "committed" and message["iteration"] >= 2:
            end[0], due[0] = now + 60 * minutes, now + dice.uniform(*CALM)
        if now > end[0]:
            job.stop()
        elif now > due[0]:
            who, seconds = dice.choice(suspensions), dice.uniform(5, longest)
            times[who].append(seconds)
            pids = list(job.launcher.pids.values())
            if who != "the launcher":
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
            waker = threading.Thread(target=wake, args=(pids, seconds, who, dice.random()), daemon=True)
            if who != "the launcher":
                waker.start()
            if who != "all workers":
                time.sleep(seconds)
            due[0] = time.monotonic() + dice.uniform(*CALM) + (seconds if who == "all workers" else 0)

    def wake(pids: list[int], seconds: float, who: str, seed: float) -> None:
        time.sleep(seconds)
        order = random.Random(seed).sample(pids, len(pids))
        for pid in order:
            with contextlib.suppress(ProcessLookupError):  # the job is over
                os.kill(pid, signal.SIGCONT)
            if who == "all workers":
                time.sleep(0.5)

    with contextlib.redirect_stdout(pipe.stream):
        job = LocalJob(
            **GRID,
            pace=PACE,
            hang_seconds=20.0,
            on_message=act,
            on_line=hear,
            on_generation=lambda job, deployment: generations.append(f"{deployment.generation}: {deployment.reason}"),
        ).run()
        callback.over.set()
        pipe.over.set()
        for way in ways:
            way.close()
    pipe.close()
    print(describe())
    print(f"{minutes:g} min, {len(job.iterations)} iterations; held up")
    for what, seconds in times.items():
        longest_one = f", {min(seconds):.0f} to {max(seconds):.0f} s, {sum(seconds):.0f} s in all" if seconds else ""
        print(f"  {what}: {len(seconds)} times{longest_one}")
    print(f"false deaths: {len(job.dead)} {job.dead or ''}")
    # The first is the job's own beginning.
    print(f"generations formed without a death: {len(generations) - 1 - len(job.dead)} {generations[1:] or ''}")
    printed = [line for line in pipe.read.decode().splitlines() if line.startswith("iteration ")]
    missing = [len(job.iterations) - len(seen) for seen in (callback.seen, printed)]
    print(f"iterations that on_iteration and standard output lack: {missing[0]} and {missing[1]}")
    for text in said + [line["warning"] for line in job.lines if "warning" in line]:
        print(f"  said: {text}")


def hang(number: int) -> float:
    """Seconds from a hang in forward until its worker is out."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        once = Path(folder) / "once"
        once.touch()

        def watch(job: LocalJob, worker: str, message: dict[str, Any]) -> None:
            if not times and not once.exists():
                times.append(time.monotonic())

        def act(job: LocalJob, line: dict[str, Any]) -> None:
            if "failure" in line:
                times.append(time.monotonic())
                job.stop()

        options = {"once": str(once), "iteration": 4, "pipeline": number % 3, **TINY}
        LocalJob(
            **GRID,
            pace=PACE,
            hang_seconds=20.0,
            workload=NamedWorkload("tests.agent.hanging:SlowForward", options),
            on_message=watch,
            on_line=act,
        ).run()
    return times[1] - times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--longest", type=float, default=120.0, help="seconds of a suspension")
    parser.add_argument("--held", type=float, default=60.0, help="seconds of a call, and in which nobody reads")
    parser.add_argument("--burners", type=int, default=os.cpu_count() or 2, help="processes that only burn time")
    parser.add_argument("--nice", type=int, default=0, help="added to that of the processes that burn time")
    parser.add_argument("--hangs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(describe())
    say_hangs(options.hangs, "without burners")
    if options.burners:
        with burning(options.burners, options.nice):
            held_up(options.minutes, options.longest, options.held, options.seed)
            say_hangs(options.hangs, f"with {options.burners} burners")
    else:
        held_up(options.minutes, options.longest, options.held, options.seed)


def say_hangs(count: int, beside: str) -> None:
    times = [round(hang(number), 1) for number in range(count)]
    print(describe())
    if count:
        print(f"a hang in forward at ops of {1000 * PACE:g} ms, {beside}: its worker is out after {times} s")


if __name__ == "__main__":
    main()
