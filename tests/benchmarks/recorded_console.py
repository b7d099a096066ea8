"""`openrecycle serve` that also notes when each heartbeat came: worker, incarnation, seconds of its monotonic
clock, one line each, into the file that OPENRECYCLE_HEARTBEATS names."""

from __future__ import annotations

import os
import time
from pathlib import Path

from openrecycle.agent.messages.protocol import Heartbeat
from openrecycle.app.cli import cli
from openrecycle.app.jobs.live_job import LiveJob


def main() -> None:
    heard = LiveJob.heard
    with Path(os.environ["OPENRECYCLE_HEARTBEATS"]).open("a", buffering=1) as file:

        def noted(job: LiveJob, beat: Heartbeat) -> int:
            file.write(f"{beat.worker} {beat.incarnation} {time.monotonic():.6f}\n")
            return heard(job, beat)

        LiveJob.heard = noted  # type: ignore[method-assign, assignment]
        cli()


if __name__ == "__main__":
    main()
