"""What holds whatever happens, in whatever order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from openrecycle.agent.coordination import coordinator
from openrecycle.agent.coordination.membership import (
    PRESENT,
    Candidate,
    Chosen,
    ConsoleRestarted,
    DrainAsked,
    Exited,
    Finished,
    GenerationAcknowledged,
    IterationsCommitted,
    Mode,
    ModeSet,
    Offer,
    Offered,
    PlanFrozen,
    PlanReady,
    PlanRefused,
    RestartAsked,
    Stalled,
    State,
    Tick,
    TransferBroken,
    UsePlan,
    WorkerRegistered,
)
from openrecycle.agent.messages.protocol import JobState, WorkerState
from openrecycle.planner.jobs.words import MIGRATE, REROUTE, STAND_BY
from tests.agent.coordinator_run import FAILURE_TIMEOUTS, Run
from tests.conftest import examples

PIPELINES, STAGES = 3, 2
NAMES = [f"W{p}_{s}" for p in range(PIPELINES) for s in range(STAGES)]
name = st.sampled_from(NAMES)


class Membership(RuleBasedStateMachine):
    """A job whose workers, launcher and console do whatever they like."""

    def __init__(self) -> None:
        super().__init__()
        self.run_ = Run(PIPELINES, STAGES, iterations=50, plans=False)
        self.incarnations = 0
        self.registered: list[WorkerRegistered] = []
        self.refused = False

    def current(self, worker: str) -> str:
        return self.run_.member(worker).incarnation or "none"

    def old(self, worker: str, pick: int) -> str | None:
        member = self.run_.member(worker)
        fenced = [*member.retired]
        if member.state is WorkerState.FAILED and member.incarnation and not member.leaving:
            fenced.append(member.incarnation)
        return fenced[pick % len(fenced)] if fenced else None

    @rule(worker=name)
    def register(self, worker: str) -> None:
        self.incarnations += 1
        event = WorkerRegistered(worker, f"i{self.incarnations}")
        if self.run_.send(event).refusal is None:
            self.registered.append(event)

    @precondition(lambda self: self.registered)
    @rule(pick=st.integers(0, 30))
    def registration_comes_again(self, pick: int) -> None:
        """The network repeats it: whatever has become of the process since, nothing follows."""
        before = self.run_.state
        self.run_.send(self.registered[-1 - pick % len(self.registered)])
        assert self.run_.state is before

    @rule()
    def register_everyone(self) -> None:
        for worker in NAMES:
            if self.run_.member(worker).state in (WorkerState.STARTING, WorkerState.FAILED):
                self.register(worker)

    @rule(worker=name)
    def exit(self, worker: str) -> None:
        self.run_.exit(worker)

    @rule(worker=name)
    def close(self, worker: str) -> None:
        before = self.run_.state
        self.run_.close(worker)
        if not before.pending:
            assert not self.run_.state.halted or before.halted, "it is no failure"

    @rule(reporter=name, worker=name, generation=st.integers(0, 4))
    def transfer(self, reporter: str, worker: str, generation: int) -> None:
        self.run_.send(TransferBroken(reporter, self.current(reporter), worker, generation))

    @rule(workers=st.sets(name), draining=st.booleans())
    def heartbeats(self, workers: set[str], draining: bool) -> None:
        self.run_.beat(*workers, draining=draining and len(workers) == 1)

    @rule(seconds=st.sampled_from([1, 3, 8, 25]), workers=st.sets(name, min_size=3))
    def time_goes_by(self, seconds: int, workers: set[str]) -> None:
        self.run_.wait(seconds, *workers)

    @rule(seconds=st.sampled_from([30, round(FAILURE_TIMEOUTS.lost) + 1]))
    def nobody_is_heard(self, seconds: int) -> None:
        """Whatever is decided then, nobody is fenced for it."""
        before, out = self.run_.state, (WorkerState.FAILED, WorkerState.FINISHED)
        self.run_.now += seconds
        self.run_.send(Tick())
        if not (before.pending or before.broken):
            went = [n for n, m in before.members.items() if m.state not in out and self.run_.member(n).state in out]
            assert all(before.members[n].draining or before.committed >= before.iterations for n in went)

    @rule(seconds=st.floats(1, 100))
    def console_stalls(self, seconds: float) -> None:
        self.run_.now += seconds
        self.run_.send(Stalled(seconds))

    @precondition(lambda self: self.run_.wanted)
    @rule(pick=st.integers(0, 3))
    def plan_arrives(self, pick: int) -> None:
        wanted = self.run_.wanted[-1 - pick % len(self.run_.wanted)]
        self.run_.send(PlanReady(wanted, f"p{len(self.run_.log)}", "made"))

    @precondition(lambda self: self.run_.wanted)
    @rule()
    def plan_is_refused(self) -> None:
        self.run_.send(PlanRefused(self.run_.wanted[-1], "no schedule exists"))
        self.refused = True

    @rule(worker=name, state=st.sampled_from(["adopted", "formed", "resumed"]), back=st.integers(-1, 2))
    def acknowledge(self, worker: str, state: str, back: int) -> None:
        generation = max(1, self.run_.state.generation - back)
        self.run_.send(GenerationAcknowledged(worker, self.current(worker), generation, state))  # type: ignore[arg-type]

    @precondition(lambda self: self.run_.state.current)
    @rule()
    def everyone_resumes(self) -> None:
        self.run_.resume()

    @rule(count=st.integers(0, 51))
    def iterations(self, count: int) -> None:
        self.run_.send(IterationsCommitted(count))

    @rule()
    def console_restarts(self) -> None:
        self.run_.send(ConsoleRestarted())

    @rule(mode=st.sampled_from(Mode), choice_timeout=st.sampled_from([2.0, 30.0]))
    def mode_is_set(self, mode: Mode, choice_timeout: float) -> None:
        self.run_.send(ModeSet(mode, choice_timeout, "ada"))

    @rule(frozen=st.booleans())
    def plan_is_frozen(self, frozen: bool) -> None:
        self.run_.send(PlanFrozen(frozen, "ada"))

    @rule(actor=st.sampled_from(["ada", ""]), fits=st.booleans())
    def other_plan(self, actor: str, fits: bool) -> None:
        current = self.run_.state.current
        failed = current.failed if current and fits else ("W0_0",)
        before, frozen = len(self.run_.opened), self.run_.state.frozen_by
        self.run_.send(UsePlan(f"q{len(self.run_.log)}", failed, actor, "" if actor else "it is better"))
        assert not frozen or len(self.run_.opened) == before

    @rule(worker=name)
    def restart(self, worker: str) -> None:
        self.run_.send(RestartAsked(worker))

    @rule(worker=name)
    def drain(self, worker: str) -> None:
        self.run_.send(DrainAsked(worker, "ada"))

    @rule(sources=st.lists(name, max_size=2, unique=True), dropped=st.sets(name, max_size=2), better=st.booleans())
    def advice_comes(self, sources: list[str], dropped: set[str], better: bool) -> None:
        """For the workers that are out, or about to be: sensible or not."""
        state = self.run_.state
        now = state.pending or state.current
        if now is None:
            return
        failed = now.failed
        moves = tuple((source, to) for source, to in zip(sources, failed, strict=False) if source not in failed)
        after = tuple(n for n in NAMES if n in {*failed, *(a for a, _ in moves)} - {b for _, b in moves})
        candidates = (
            Candidate(MIGRATE, after, moves),
            Candidate(REROUTE, failed),
            Candidate(STAND_BY, tuple(n for n in NAMES if n in {*failed, *dropped})),
        )
        offer = Offer(failed, candidates, MIGRATE if better and moves else "")
        self.run_.send(Offered(failed, offer))

    @rule()
    def advice_fails(self) -> None:
        state = self.run_.state
        now = state.pending or state.current
        self.run_.send(Offered(now.failed if now else (), None, "it took too long"))

    @rule(way=st.sampled_from([REROUTE, MIGRATE, STAND_BY, "nothing"]))
    def operator_chooses(self, way: str) -> None:
        self.run_.send(Chosen(way, "ada"))

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def job_ends(self, really: bool) -> None:
        if really:
            self.run_.send(Finished(JobState.STOPPED, "the launcher stopped"))

    @rule(
        worker=name, pick=st.integers(0, 9), state=st.sampled_from(["adopted", "resumed"]), generation=st.integers(1, 9)
    )
    def fenced_worker(self, worker: str, pick: int, state: str, generation: int) -> None:
        incarnation = self.old(worker, pick)
        if incarnation is None:
            return
        before = self.run_.state
        self.run_.send(GenerationAcknowledged(worker, incarnation, generation, state))  # type: ignore[arg-type]
        self.run_.send(TransferBroken(worker, incarnation, NAMES[0], generation))
        assert self.run_.state is before
        step = self.run_.send(WorkerRegistered(worker, incarnation))
        assert step.refusal is not None
        assert self.run_.state is before
        self.run_.send(Exited(worker, incarnation, "launcher"))
        assert self.run_.state is before

    # -- what always holds ------------------------------------------------------------------

    @invariant()
    def generations_only_rise_by_one(self) -> None:
        assert [e.number for e in self.run_.opened] == list(range(1, len(self.run_.opened) + 1))
        assert self.run_.state.generation == len(self.run_.opened)

    @invariant()
    def those_waited_for_are_counted_right(self) -> None:
        state = self.run_.state
        assert state.tally == replace(state).tally, "kept up from report to report, and counted anew"

    @invariant()
    def one_plan_in_force_and_it_fits(self) -> None:
        for generation in self.run_.opened:
            assert generation.plan_fingerprint
            assert set(generation.living) | set(generation.failed) == set(NAMES)
            assert not set(generation.living) & set(generation.failed)
            assert set(generation.joining) <= set(generation.living)
            with_weights = {n.partition("_")[2] for n in set(generation.living) - set(generation.joining)}
            assert with_weights == {str(s) for s in range(STAGES)}

    @invariant()
    def a_failed_member_of_the_generation_is_being_replaced(self) -> None:
        state = self.run_.state
        if state.current is None or state.over:
            return
        failed = [n for n in state.current.living if state.members[n].state is WorkerState.FAILED]
        assert not failed or state.pending or state.halted

    @invariant()
    def pending_is_what_the_members_say(self) -> None:
        pending, state = self.run_.state.pending, self.run_.state
        if pending is not None:
            assert not state.halted
            assert not state.over
            for worker in pending.failed:
                assert state.members[worker].state in (WorkerState.FAILED, WorkerState.FINISHED)

    @invariant()
    def each_process_has_one_place(self) -> None:
        members = self.run_.state.members.values()
        held = [m.incarnation for m in members if m.incarnation is not None]
        assert len(held) == len(set(held))
        for generation in self.run_.opened:
            for source, to in generation.moves:
                assert to in generation.living and source != to

    @invariant()
    def who_is_let_go_was_there_and_is_not_any_more(self) -> None:
        for before, generation in pairwise(self.run_.opened):
            assert {worker for worker, _ in generation.let_go} <= {*before.living} & {*generation.failed}

    @invariant()
    def who_is_lost_was_there_with_a_process_that_is_gone(self) -> None:
        assert [{*generation.lost} for generation in self.run_.opened[1:]] == self.run_.lost()

    @invariant()
    def nobody_is_asked_in_vain(self) -> None:
        """A wait for a choice has an end, is for a loss, and asks for no plan meanwhile."""
        state = self.run_.state
        if state.choosing:
            assert state.pending is not None and state.pending.until is not None and state.current is not None
            assert state.pending.until <= self.run_.now + 30.001
            assert set(state.pending.failed) - set(state.current.failed)
            assert not state.pending.restore

    @invariant()
    def there_is_a_sentence(self) -> None:
        text = self.run_.sentence()
        assert text.endswith(".")
        assert "None" not in text

    def quiet(self) -> None:
        """From here on nothing happens but what has to: plans are made, whoever lives says so and follows, and who was
        asked to leave goes."""
        run = self.run_
        run.plans = True
        run.send(PlanFrozen(False, "ada"))
        run.send(ModeSet(Mode.AUTOMATIC, 2.0, "ada"))
        for _ in range(12):
            for worker, member in run.state.members.items():
                if member.goes:
                    run.exit(worker)
            if run.state.pending is not None:
                run.send(PlanReady(run.state.pending.failed, f"p{len(run.log)}", "made"))
            run.wait(1, *NAMES)
            if run.state.current is not None and run.state.broken is None:
                run.resume()
        state = run.state
        if state.current is None or state.over:
            return
        there = {name: m.state for name, m in state.members.items() if m.state in PRESENT}
        held = {state.members[name].stage for name, now in there.items() if now is not WorkerState.REJOINING}
        if not state.halted:
            assert state.settled and set(there) == set(state.current.living) and len(held) == STAGES
            assert WorkerState.REJOINING not in there.values()
        elif not self.refused:
            assert len(held) < STAGES or state.links.barred

    def teardown(self) -> None:
        """It comes to rest; and the same log gives the same state."""
        self.quiet()
        state = State.new(PIPELINES, STAGES, 50)
        for event, now in self.run_.log:
            state = coordinator.step(state, event, now, FAILURE_TIMEOUTS).state
        assert state == self.run_.state


TestMembership = Membership.TestCase
TestMembership.settings = examples(80, stateful_step_count=40)
