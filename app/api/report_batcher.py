"""What many workers of a job report at the same time is stored in one transaction.

When a generation opens, every worker acknowledges it three times within a second or two. A transaction each
would keep the console of a large job busy for longer than the workers take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from openrecycle.app.jobs.live_job import LiveJob
from openrecycle.app.jobs.report_batch import IncomingReport
from openrecycle.app.runtime.runner import in_thread

# Of one transaction: whoever else waits for the job, such as the clock that looks for silent workers, comes in between.
MOST = 1024


class ReportBatcher:
    """Of all jobs, in the API's event loop: what comes while a job stores, it takes together next."""

    def __init__(self) -> None:
        self._queues: dict[LiveJob, list[tuple[IncomingReport, asyncio.Future[str]]]] = {}
        self._busy: set[LiveJob] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, job: LiveJob, report: IncomingReport) -> asyncio.Future[str]:
        """The reason, once it is stored; or ConsoleError, as LiveJob.apply raises it."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(job, []).append((report, answer))
        if job not in self._busy:
            self._busy.add(job)
            task = asyncio.create_task(self._drain(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return answer

    async def _drain(self, job: LiveJob) -> None:
        while waiting := self._queues.pop(job, None):
            queue, later = waiting[:MOST], waiting[MOST:]
            if later:
                self._queues[job] = later
            results: Sequence[str | Exception]
            try:
                results = await in_thread(job.apply_all, [report for report, _ in queue])
            except Exception as error:
                results = [error] * len(queue)
            # Before anybody hears of it: a loop may end with its last answer.
            if job not in self._queues:
                self._busy.discard(job)
            for (_, answer), result in zip(queue, results, strict=True):
                if answer.done():  # its connection is gone
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)
            if job not in self._busy:
                return
