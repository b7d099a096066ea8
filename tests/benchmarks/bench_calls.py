"""How many functions of the product, and how many calls of them, does each of these take? Of a job of 12 workers:

- a heartbeat, from the route's function to the console's memory
- the exit of a worker, from the route's function to the decided and stored generation; its plan is made ahead
- one more run of Live's script, and of the Planner's with an answer

Calls of libraries are not counted, but those that they make back into the product are. All threads count. Functions
with a name are also counted alone, without comprehensions and lambdas.

    python -m tests.benchmarks.bench_calls
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

from streamlit.testing.v1 import AppTest

from openrecycle.agent.messages.protocol import FailureReport, Heartbeat
from openrecycle.app.console.service import set_console
from tests.app.ui_console import DEADLINE, MAIN, ConsoleHere, JobHere, turn_to, until
from tests.benchmarks.machine import describe

ROOT = Path(__file__).resolve().parents[2]
ROOMS = tuple(f"{ROOT / room}/" for room in ("agent", "app", "planner", "db"))


def main() -> None:
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        here = ConsoleHere(Path(folder))
        set_console(here.console)
        try:
            measure(here)
        finally:
            here.close()


def measure(here: ConsoleHere) -> None:
    job = JobHere(here.console, "counted").register()
    job.commit(1, 20, 1)
    live = here.console.jobs.find(job.job_id)
    until(lambda: live.plans.ahead.ready_for, "its plan is made ahead")
    live.plans.make_ready(())  # as a thread of the console does, which may not have done it yet
    beat = Heartbeat(
        worker="W1_2", incarnation=job.process("W1_2"), generation=1, iteration=20, seq=3, phase="training"
    )
    here.console.reports.heartbeats(job.job_id, [beat])
    with counted("heartbeat to memory"):
        here.console.reports.heartbeats(job.job_id, [beat])
    exited = FailureReport(
        cause="exit", worker="W1_2", incarnation=beat.incarnation, reporter="launcher", generation=1, detail="killed"
    )
    with counted("exit of a worker to its generation"):
        here.console.reports.failures(job.job_id, [exited])
    assert live.state.generation == 2
    page = turn_to(AppTest.from_file(MAIN, default_timeout=DEADLINE), "live")
    page.run()
    with counted("one more run of Live"):
        page.run()
    assert any("counted" in str(html.value) for html in page.get("html")), "Live does not show the job"
    page = turn_to(AppTest.from_file(MAIN, default_timeout=DEADLINE), "planner")
    page.run()
    page.button(key="planner-example").click()
    until(lambda: bool(page.run().get("plotly_chart")), "the Planner answers")
    with counted("one more run of the Planner with its answer"):
        page.run()


@contextmanager
def counted(what: str) -> Iterator[None]:
    """Prints how many functions the block called, and how often."""
    calls = Counter[CodeType]()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOMS):
            calls[frame.f_code] += 1

    threading.setprofile(look)  # of threads that begin from now on
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    named = sum(not code.co_name.startswith("<") for code in calls)
    print(f"{what:45}{len(calls):6,} functions, {named:3,} with a name{calls.total():8,} calls", flush=True)


if __name__ == "__main__":
    main()
