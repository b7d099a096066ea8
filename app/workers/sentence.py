"""One sentence that says what the coordinator does or waits for, and why."""

from __future__ import annotations

from collections import Counter

from openrecycle.agent.coordination.coordinator import nobody_heard
from openrecycle.agent.coordination.membership import FailureTimeouts, Member, State, peer_of, returned
from openrecycle.agent.messages.protocol import JobState, WorkerState
from openrecycle.app.workers.states import WorkerStates, lost_name
from openrecycle.planner.jobs.words import layers_moved, names, percent

MOST_MOVES = 4


def sentence(
    worker_states: WorkerStates, now: float, failure_timeouts: FailureTimeouts, *, share: float | None = None
) -> str:
    """share: of the fault-free throughput, that it trains at of late; None: not known."""
    state = worker_states.state
    if not worker_states.paused or state.over:
        return _whole(_text(worker_states, now, failure_timeouts, share))
    held = "paused: all workers wait before the same iteration until somebody resumes the job."
    if worker_states.running_on:
        held = f"pausing: waiting for {names(worker_states.running_on)} to finish the iteration in hand."
    if state.halted or not state.settled:
        return _whole(f"{held} {_whole(_text(worker_states, now, failure_timeouts, None))}")
    return _whole(" ".join(part for part in (held, _who_is_out(worker_states)) if part))


def over_sentence(state: JobState, reason: str) -> str:
    """Of a job that has ended."""
    ended = f"The job has {'been stopped' if state is JobState.STOPPED else 'finished'}"
    return _whole(f"{ended}: {reason}" if reason else ended)


def _whole(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".") + "."


def _text(worker_states: WorkerStates, now: float, failure_timeouts: FailureTimeouts, share: float | None) -> str:
    state = worker_states.state
    if state.over:
        return over_sentence(state.over, state.over_reason)
    if state.halted:
        return state.halted
    if (nobody := nobody_heard(state, now)) > failure_timeouts.dead:
        return (
            f"Waiting for all workers: none has been heard for {nobody:.0f} s, so they are suspended, or cut off from "
            f"here; the job is given up at {failure_timeouts.lost:g} s."
        )
    if silent := _most_silent(state, now, failure_timeouts):
        age = now - (silent.last_heard or now)
        return f"Waiting for {silent.name}: last heard {age:.1f} s ago, dead at {failure_timeouts.dead:g} s."
    if state.pending and state.pending.until is not None:
        return _waiting_for_a_choice(state, state.pending.until - now)
    if state.pending:
        without = f" without {names(state.pending.failed)}" if state.pending.failed else ""
        return f"Making the plan for generation {state.generation + 1}{without}: {state.pending.reason}."
    if state.current is None:
        return _before_the_first_generation(state)
    if state.broken:
        peer = peer_of(state.broken.reporter, state.broken.worker)
        left = max(0.0, state.broken.since + failure_timeouts.transfer_grace - now)
        return (
            f"{state.broken.reporter} can't exchange data with {peer}: waiting {left:.1f} s more "
            "for an exit or a time-out that explains it, then all connect anew."
        )
    return _in_a_generation(worker_states, share)


def _waiting_for_a_choice(state: State, left: float) -> str:
    assert state.pending is not None
    # In minutes while there are many: the sentence is read out whenever it changes.
    failed, seconds = state.pending.failed, f"{max(0.0, left):.0f} s" if left < 120 else f"{left / 60:.0f} min"
    offer = state.offer if state.offer and state.offer.failed == failed else None
    if offer is None:
        return f"Waiting for you: the options without {names(failed)} are being compared; the job goes on in {seconds}."
    count, best = len(offer.candidates), offer.candidates[0].name
    ways = "1 option" if count == 1 else f"{count} options"
    return f"Waiting for you: {ways} to go on without {names(failed)}; the best ({best}) is taken in {seconds}."


def _before_the_first_generation(state: State) -> str:
    failed = [m for m in state.members.values() if m.state is WorkerState.FAILED]
    if failed:
        return f"Waiting for {names([m.name for m in failed])} to be started again: {failed[0].detail}."
    missing = [m.name for m in state.members.values() if m.incarnation is None]
    return f"Waiting for {len(missing):,} of {len(state.members):,} workers to register: {names(missing)}."


def _in_a_generation(worker_states: WorkerStates, share: float | None) -> str:
    state = worker_states.state
    assert state.current is not None
    waiting, living = state.unsettled(), len(state.current.living)
    if waiting and state.moving and state.interim is not None:
        return f"Training with {living:,} of {len(state.members):,} workers; {_moving(state)}"
    if waiting:
        steps = {"": "to take up the plan", "adopted": "to form its groups", "formed": "to commit its first iteration"}
        slowest = min(waiting, key=lambda m: list(steps).index(m.acknowledged))
        alike = [m.name for m in waiting if m.acknowledged == slowest.acknowledged]
        return (
            f"Generation {state.generation} ({state.current.reason}): {living - len(waiting):,} of "
            f"{living:,} workers train by it; "
            f"waiting for {names(alike)} {steps[slowest.acknowledged]}."
        )
    everyone = "all" if living == len(state.members) else f"{living:,} of"
    text = f"Training in generation {state.generation} with {everyone} {len(state.members):,} workers"
    if living < len(state.members) and share is not None:
        text += f", at {percent(share)} of the fault-free throughput"
    out = _who_is_out(worker_states)
    work = "Living peers of the same stage do the work." if out else ""
    moving = _moving(state) if state.moving else ""
    frozen = _frozen(state) if state.frozen_by else ""
    return " ".join(part for part in (f"{text}.", moving, out, work, frozen) if part)


def _moving(state: State) -> str:
    assert state.current is not None
    then = state.current.partition
    count = layers_moved(state.held, then)
    what = "1 layer moves to another stage" if count == 1 else f"{count} layers move to other stages"
    return f"{what}, beside the training; from then on stages hold {', '.join(map(str, then))}."


def _who_is_out(worker_states: WorkerStates) -> str:
    """Which processes are gone, and who took their places."""
    state, missing = worker_states.state, worker_states.missing
    if state.current is None or not state.current.failed:
        return ""
    named = {p: lost_name(p, p.slot in state.current.lives_in) for p in missing}
    failed, drained = ([name for p, name in named.items() if p.ended == how] for how in ("failed", "drained"))
    gone = [f"{names(failed, last=' and ')} failed"] if failed else []
    gone += [f"{names(drained, last=' and ')} {'was' if len(drained) == 1 else 'were'} drained"] if drained else []
    text = "; ".join(gone)
    moved = [f"{p.slot}'s process holds {p.role} now" for p in worker_states.moved if p.role in state.current.lives_in]
    if len(moved) > MOST_MOVES:
        moved = [*moved[:MOST_MOVES], f"and {len(moved) - MOST_MOVES:,} more have moved"]
    sentences = [text or f"{names(state.current.failed)} are empty", ", ".join(moved), _spare(worker_states)]
    return ". ".join(part for part in sentences if part) + "."


def _spare(worker_states: WorkerStates) -> str:
    """Which ranks run nothing, and what for."""
    on = Counter(rank.host for rank in worker_states.spares)
    if not on:
        return ""
    ranks = max(len(process.ranks) for process in worker_states.known.values())
    total, (first, *others) = on.total(), sorted(on)
    where = names([f"{on[host]} on {host}" for host in sorted(on)]) if others else f"on {first}"
    left = "1 of its ranks is" if total == 1 else f"{total} of their ranks are"
    return f"{left} spare ({where}): {ranks} on one node make a worker"


def _frozen(state: State) -> str:
    text = f"The plan is frozen by {state.frozen_by}"
    if back := returned(state):
        return f"{text}: {names(back)} {'is' if len(back) == 1 else 'are'} back, and can re-join once it is not."
    return f"{text}: a better one waits until it is not."


def _most_silent(state: State, now: float, failure_timeouts: FailureTimeouts) -> Member | None:
    overdue = [
        m
        for m in state.members.values()
        if m.state not in (WorkerState.FAILED, WorkerState.FINISHED)
        and not m.draining
        and m.last_heard is not None
        and now - m.last_heard > failure_timeouts.suspect
    ]
    return min(overdue, key=lambda m: m.last_heard or 0.0, default=None)
