"""Reports that many workers make at the same time, taken one after the other before anything is stored. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrecycle.agent.coordination.coordinator import step
from openrecycle.agent.coordination.events import Exited, GenerationAcknowledged, Note, Refuse, WorkerRegistered
from openrecycle.agent.coordination.membership import FailureTimeouts, State
from openrecycle.app.workers.states import Arrival


@dataclass(frozen=True)
class IncomingReport:
    """An event, and what is stored beside it if it is accepted. process: of a worker that registers. spare: of one that
    has exited, the ranks that are spare. acknowledgement: a row."""

    event: WorkerRegistered | GenerationAcknowledged | Exited
    process: Arrival | None = None
    spare: tuple[int, ...] = ()
    acknowledgement: Mapping[str, Any] | None = None


def run_together(
    state: State, reports: Sequence[IncomingReport], now: float, failure_timeouts: FailureTimeouts
) -> tuple[State, list[Note], list[str | Refuse]]:
    """Takes reports up to the first one that asks for a plan or opens a generation, which is not taken.

    Returns the state after them, what they add to the event feed, and for each the reason or refusal.
    """
    notes: list[Note] = []
    answers: list[str | Refuse] = []
    for report in reports:
        after = step(state, report.event, now, failure_timeouts)
        said = [decision for decision in after.decisions if isinstance(decision, Note)]
        if len(said) < len(after.decisions) - (after.refusal is not None):
            break
        notes += said
        answers.append(after.refusal or after.reason)
        state = after.state
    return state, notes, answers


def processes_of(reports: Iterable[IncomingReport]) -> dict[str, Arrival]:
    """Those that registered, by incarnation."""
    return {report.event.incarnation: report.process for report in reports if report.process}


def spares_of(reports: Iterable[IncomingReport]) -> dict[str, tuple[int, ...]]:
    """Of those that exited, by incarnation, the ranks that are spare."""
    return {report.event.incarnation: report.spare for report in reports if report.spare}
