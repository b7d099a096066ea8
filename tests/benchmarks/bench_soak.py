"""Hundreds of deaths in one job: are the losses those of a job without any, is anybody lost who was not killed, and do
the console, the launcher and the server that workers are forked from keep their size?

A job of 3 x 2 workers with a console. Every few seconds a random worker gets a SIGKILL, also while others are being
started again. Then the same job runs without deaths, for as many iterations.

    python -m tests.benchmarks.bench_soak --minutes 25 --every 3
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests

from tests.agent.node_runs import free_port
from tests.agent.runs import launch
from tests.benchmarks.machine import children, describe

MODEL = ("--pipelines", "3", "--stages", "2", "--micro-batches", "3")
JOB = (*MODEL, "--pace", "F=30ms,I=30ms,W=30ms", "--compare-every", "20", "--max-restarts", "1000000")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        soak(Path(folder), options.minutes, options.every, random.Random(options.seed))
    print(describe())


def soak(folder: Path, minutes: float, every: float, dice: random.Random) -> None:
    """Runs both jobs, and prints what came of them."""
    port, record = free_port(), folder / "record.jsonl"
    address, kills, sizes = f"http://127.0.0.1:{port}", 0, []
    with (folder / "log").open("w") as log:
        serve = ("-m", "app", "serve", "--port", str(port), "--database-url", f"sqlite:///{folder}/console.db")
        console = subprocess.Popen([sys.executable, *serve], stdout=log, stderr=log)
        while not _answers(f"{address}/healthz"):
            time.sleep(0.2)
        told = ("--iterations", "100000000", "--restart-delay", "0.5", "--console", address, "--record", str(record))
        train = [sys.executable, "-m", "agent", "train", *JOB, *told]
        launcher = subprocess.Popen(train, stdout=log, stderr=log)
        while not record.exists() or '"iteration"' not in record.read_text():
            time.sleep(0.2)
        job = requests.get(f"{address}/api/v1/jobs", timeout=60).json()["jobs"][0]["job_id"]
        asked, end = 0.0, time.monotonic() + 60 * minutes
        while time.monotonic() < end and launcher.poll() is None:
            time.sleep(every)
            server = max(children(launcher.pid), key=lambda pid: len(children(pid)))
            workers = children(server)
            if len(workers) >= 5:  # else a stage may have nobody
                with contextlib.suppress(ProcessLookupError):
                    os.kill(dice.choice(workers), signal.SIGKILL)
                    kills += 1
            if (now := time.monotonic()) > asked + 2 * every:
                # The launcher waits longer with each death of a worker; an operator does not.
                asked = now
                for worker in (f"W{p}_{s}" for p in range(3) for s in range(2)):
                    requests.post(f"{address}/api/v1/jobs/{job}/workers/{worker}/restart", timeout=60)
            sizes.append((_mebibytes(console.pid), _mebibytes(launcher.pid), _mebibytes(server)))
        launcher.send_signal(signal.SIGINT)
        launcher.wait()
        console.send_signal(signal.SIGINT)
        console.wait()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    losses = {line["iteration"]: line["loss"] for line in lines if "iteration" in line and "loss" in line}
    failures = [line["failure"] for line in lines if "failure" in line]
    free = launch(folder / "free.jsonl", *MODEL, "--iterations", str(len(losses)), timeout=3600)
    others = sum(losses[line["iteration"]] != line["loss"] for line in free.iterations)
    print(f"{len(losses)} iterations, {kills} kills, {len(failures)} failures: {others} losses are other ones")
    for name, values in zip(("console", "launcher", "fork server"), zip(*sizes, strict=True), strict=True):
        quarters = [values[len(values) * quarter // 4] for quarter in range(4)] + [values[-1]]
        print(f"  {name}: " + ", ".join(f"{value:.0f}" for value in quarters) + " MiB, at the quarters of that time")


def _answers(address: str) -> bool:
    try:
        return requests.get(address, timeout=5).status_code == 200
    except requests.ConnectionError:
        return False


def _mebibytes(pid: int) -> float:
    """Resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
