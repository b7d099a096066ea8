"""A job that is stopped by a signal that reaches its workers as well."""

from __future__ import annotations

import signal

import pytest

from openrecycle.agent.coordination.launcher import Failure
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.launcher.launch import JobFailed, Stopped
from tests.agent.local_jobs import LocalJob

pytestmark = pytest.mark.processes


class Signalled(LocalCoordination):
    """The launcher's signal has come by when it sees the first worker's end, where `stopped`."""

    stopped = True
    ended: tuple[str, str] | None = None
    job: LocalJob

    def failed(self, failure: Failure) -> None:
        if self.stopped:
            self.job.launcher.stop(signal.SIGTERM)
        super().failed(failure)

    def finished(self, state: str, reason: str) -> None:
        self.ended = state, reason


@pytest.mark.parametrize(("stopped", "how"), [(True, Stopped), (False, JobFailed)])
def test_a_signal_to_all_processes_is_no_failure(stopped: bool, how: type[Exception]) -> None:
    made = list[Signalled]()

    def decides(*arguments: object, **about: object) -> Signalled:
        made.append(Signalled(*arguments, **about))  # type: ignore[arg-type]
        return made[0]

    job = LocalJob(pipelines=1, stages=1, micro_batches=1, kills=("W0_0@1:F0",), decides=decides)
    made[0].job, made[0].stopped = job, stopped
    with pytest.raises(how) as raised:
        job.launcher.run()
    assert made[0].ended == ("stopped", str(raised.value))
    assert ("SIGTERM" in str(raised.value)) == stopped
