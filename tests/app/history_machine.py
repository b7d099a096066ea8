"""What the database holds, whatever fails and in whatever order things happen: every accepted report is in it, a
console that is started on it goes on as the one that was killed would have, and no job waits for ever.

A machine for Hypothesis; test_stored_history.py runs a few examples of it, tests/chaos/test_many_histories.py many.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from openrecycle.agent.coordination.membership import Candidate, Mode, Offer, Offered, State
from openrecycle.agent.messages.protocol import JobSpec, JobState, Message, WorkerState
from openrecycle.app.jobs.job_plans import stored_plan
from openrecycle.app.jobs.live_job import read_state
from openrecycle.db.access import AuditStore
from openrecycle.planner.jobs.job import Job
from openrecycle.planner.jobs.words import MIGRATE, REROUTE, STAND_BY
from openrecycle.planner.plans.plan import job_doc
from openrecycle.planner.simulation.policy import REPARTITION
from tests.app.flaky_database import FAULTS, Fault, FlakyDatabase
from tests.app.job_world import STEPS, Process, Report, World

PIPELINES, STAGES = 3, 2
NAMES = [f"W{p}_{s}" for p in range(PIPELINES) for s in range(STAGES)]
name = st.sampled_from(NAMES)
pick = st.integers(0, 30)


class History(RuleBasedStateMachine):
    database: FlakyDatabase

    def __init__(self) -> None:
        super().__init__()
        self.database.heal()
        layered = job_doc(Job.uniform(PIPELINES, STAGES, 3, layers=6))
        spec = JobSpec(
            name="job",
            pipelines=PIPELINES,
            stages=STAGES,
            micro_batches=3,
            iterations=60,
            migrate=True,
            profile=layered,
            relayout="auto",
            checkpoints=True,  # so that who is left moves to a stage that lost everybody
        )
        self.world = World(self.database, spec)
        self.accepted_audits: Counter[str] = Counter()
        self.next_iteration = 0

    @property
    def state(self) -> State:
        return self.world.job.state

    def process(self, number: int) -> Process | None:
        living = self.world.living
        return living[number % len(living)] if living else None

    # -- processes and their launcher -----------------------------------------------------------

    @rule()
    def plans_take_time(self) -> None:
        self.world.plans_take_time()

    @rule()
    def everyone_is_started(self) -> None:
        for worker in NAMES:
            if self.world.at(worker) is None:
                self.world.start(worker)

    @rule(worker=name)
    def starts(self, worker: str) -> None:
        if self.world.at(worker) is None:
            self.world.start(worker)

    @rule(number=pick)
    def dies(self, number: int) -> None:
        if process := self.process(number):
            self.world.die(process)

    @rule(number=pick, step=st.sampled_from(STEPS))
    def acknowledges(self, number: int, step: str) -> None:
        process = self.process(number)
        if process and process.generation and process.broken < process.generation:
            self.world.acknowledge(process, step, process.generation)

    @rule()
    def everyone_takes_up_the_generation(self) -> None:
        self.world.take_up()

    @rule()
    def the_launcher_takes_up_the_generation(self) -> None:
        self.world.poll()

    @rule(number=pick)
    def a_connection_breaks(self, number: int) -> None:
        process = self.process(number)
        if process and process.generation and process.broken < process.generation:
            self.world.breaks(process)

    @rule(count=st.integers(1, 9))
    def iterations_are_committed(self, count: int) -> None:
        if self.state.current is not None:
            self.world.commit(self.next_iteration, count)
            self.next_iteration += count

    @rule(worker=name)
    def a_recovery_is_reported(self, worker: str) -> None:
        self.world.recovered(worker, max(1, self.world.told))

    @rule(seconds=st.sampled_from([1, 3, 8]))
    def time_goes_by(self, seconds: int) -> None:
        self.world.tick(seconds, self.world.living)

    @rule(number=pick)
    def somebody_is_silent(self, number: int) -> None:
        process = self.process(number)
        self.world.tick(25, [p for p in self.world.living if p is not process])

    @rule(really=st.sampled_from([False] * 19 + [True]))
    def the_job_ends(self, really: bool) -> None:
        if really:
            self.world.finish()

    # -- the network ----------------------------------------------------------------------------

    @precondition(lambda self: self.world.unsent)
    @rule(number=pick)
    def a_report_is_tried_again(self, number: int) -> None:
        self.world.retry(self.world.unsent[number % len(self.world.unsent)])

    @precondition(lambda self: self.world.taken)
    @rule(number=pick)
    def a_report_comes_twice_or_late(self, number: int) -> None:
        """The network delivers once more, after others, what was taken already."""
        old = self.world.taken[-1 - number % len(self.world.taken)]
        self.world.deliver(Report(old.route, old.message, old.sender))
        if old in self.world.taken[:-1] and self.world.taken[-1].message is old.message:
            self.world.taken.pop()

    # -- the planner, the advisor, operators ----------------------------------------------------

    @precondition(lambda self: self.world.wanted)
    @rule(number=pick, refused=st.sampled_from([False, False, False, True]))
    def a_plan_arrives(self, number: int, refused: bool) -> None:
        """Soon, late, or when nobody waits for it any more."""
        wanted = self.world.wanted[-1 - number % len(self.world.wanted)]
        self.world.plan_arrives(wanted, refused)

    @rule()
    def the_layers_have_moved(self) -> None:
        self.world.layers_move()

    @rule(
        sources=st.lists(name, max_size=2, unique=True),
        dropped=st.sets(name, max_size=2),
        better=st.sampled_from(["", MIGRATE, REPARTITION]),
        partition=st.sampled_from([(3, 3), (2, 4), (4, 2)]),
    )
    def advice_comes(self, sources: list[str], dropped: set[str], better: str, partition: tuple[int, ...]) -> None:
        now = self.state.pending or self.state.current
        if now is None:
            return
        failed = now.failed
        moves = tuple((source, to) for source, to in zip(sources, failed, strict=False) if source not in failed)
        after = tuple(n for n in NAMES if n in {*failed, *(a for a, _ in moves)} - {b for _, b in moves})
        candidates = (
            Candidate(MIGRATE, after, moves),
            Candidate(REROUTE, failed),
            Candidate(STAND_BY, tuple(n for n in NAMES if n in {*failed, *dropped})),
            Candidate(REPARTITION, failed, partition=partition),
        )
        usable = {"": True, MIGRATE: bool(moves), REPARTITION: partition != self.state.held}[better]
        event = Offered(failed, Offer(failed, candidates, better if usable else ""))
        self.world.attempt(lambda: self.world.job.apply(event))

    def operate(self, action: str, *arguments: object) -> None:
        """What an operator is told was done is in the audit log."""
        known = {"set_mode": "mode", "freeze": "unfreeze plan" if arguments[:1] == (False,) else "freeze plan"}

        def call() -> None:
            getattr(self.world.operators, action)(self.world.job_id, *arguments, "ada")
            self.accepted_audits[known.get(action, action)] += 1

        self.world.attempt(call)

    @rule(mode=st.sampled_from(Mode), choice_timeout=st.sampled_from([2.0, 30.0]))
    def the_mode_is_set(self, mode: Mode, choice_timeout: float) -> None:
        self.operate("set_mode", mode, choice_timeout)

    @rule(frozen=st.booleans())
    def the_plan_is_frozen(self, frozen: bool) -> None:
        self.operate("freeze", frozen)

    @rule(worker=name)
    def a_worker_is_asked_to_leave(self, worker: str) -> None:
        self.operate("drain", worker)

    @rule(way=st.sampled_from([REROUTE, MIGRATE, STAND_BY, REPARTITION]))
    def an_operator_chooses(self, way: str) -> None:
        self.operate("choose", way, None)

    @rule(action=st.sampled_from(["pause", "resume"]))
    def the_job_is_held(self, action: str) -> None:
        self.operate(action)

    @rule(worker=name)
    def a_restart_is_asked_for(self, worker: str) -> None:
        self.operate("restart", worker)

    # -- what fails -----------------------------------------------------------------------------

    @rule(fault=st.sampled_from(FAULTS), healthy=st.integers(0, 3))
    def writes_fail(self, fault: Fault, healthy: int) -> None:
        self.database.fault, self.database.healthy = fault, healthy

    @rule()
    def the_database_is_away(self) -> None:
        self.database.away = True

    @rule()
    def the_database_is_well_again(self) -> None:
        self.database.heal()

    @rule()
    def the_console_is_killed(self) -> None:
        self.world.restart_console()

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def the_database_knows_what_the_console_knows(self) -> None:
        if not self.world.in_doubt and not self.database.away:
            home = self.world.job.plans.nominal.home
            stored = read_state(self.world.store, self.world.row, self.world.spec, home)
            assert durable(stored) == durable(self.state)

    @invariant()
    def the_plan_in_force_is_for_the_layers_that_are_wanted(self) -> None:
        current = self.state.current
        if current is not None and not self.database.away:
            plan = stored_plan(self.world.store, current.plan_fingerprint)
            assert plan is not None and plan.partition == current.partition

    @invariant()
    def each_process_has_one_place(self) -> None:
        held = [m.incarnation for m in self.state.members.values() if m.incarnation is not None]
        assert len(held) == len(set(held))

    @invariant()
    def the_launcher_finds_the_processes_where_the_console_has_them(self) -> None:
        """Once it was told of the newest generation; deaths that it has not reported yet aside. Of a job that is over
        the console hears no more."""
        generation = self.state.current
        if generation is None or self.state.pending or self.state.over:
            return
        if generation.number != self.world.told or self.world.unsent:
            return
        for worker in generation.living:
            member, here = self.state.members[worker], self.world.at(worker)
            if here is not None and member.generation == generation.number and member.state is not WorkerState.FAILED:
                assert here.incarnation == member.incarnation

    def teardown(self) -> None:
        self.heals()

    def heals(self) -> None:
        """When nothing fails any more, all that was accepted is there, and the job goes on."""
        self.database.heal()
        self.check_the_store()
        for _ in range(12):
            self.settle_a_little()
            if self.calm:
                break
        self.check_the_store()
        if self.state.over or self.state.halted or self.state.current is None:
            return
        assert self.calm, f"somebody waits for ever: {self.state}, {self.world.living}"

    @property
    def calm(self) -> bool:
        """Does nobody wait for anything any more? A frozen plan keeps workers that are back waiting."""
        generation, members = self.state.current, self.state.members.values()
        waiting = [m for m in members if m.state is WorkerState.REJOINING and not self.state.frozen_by]
        broken = [process for process in self.world.living if generation and process.broken >= generation.number]
        return self.state.settled and not waiting and not broken and not self.state.moving

    def settle_a_little(self) -> None:
        while self.world.unsent:
            self.world.retry(self.world.unsent[0])
        self.world.tick(3, self.world.living)
        if (missing := self.world.job.plan_missing()) is not None:
            self.world.job.ask_for(missing)
        for wanted in self.world.wanted[:]:
            self.world.plan_arrives(wanted)
        self.world.wanted.clear()
        if self.state.choosing:
            assert self.state.pending is not None and self.state.pending.until is not None
            self.world.now = max(self.world.now, self.state.pending.until - 2)
            self.world.tick(3, self.world.living)
        self.world.take_up()
        self.world.layers_move()
        while self.world.unsent:
            self.world.retry(self.world.unsent[0])

    def check_the_store(self) -> None:
        store, job_id = self.world.store, self.world.job_id
        self.world.tick(1, self.world.living)  # what was in doubt is read again, as soon as a tick may
        assert not self.world.in_doubt or self.state.over
        taken = {route: [r.message for r in self.world.taken if r.route == route] for route in _ROUTES}
        acknowledged = {
            key(row, "worker", "incarnation", "generation", "state") for row in store.acknowledgements(job_id)
        }
        assert {key(m, "worker", "incarnation", "generation", "state") for m in taken["acknowledge"]} <= acknowledged
        iterations = [row["iteration"] for row in store.iterations(job_id)]
        assert len(iterations) == len(set(iterations))
        assert {i.iteration for m in taken["committed"] for i in m.iterations} <= set(iterations)  # type: ignore[attr-defined]
        recoveries = {(row["worker"], row["generation"]) for row in store.recoveries(job_id)}
        assert {key(m, "worker", "generation") for m in taken["recovered"]} <= recoveries
        known = {i for row in store.workers(job_id) for i in (*json.loads(row["retired"]), row["incarnation"])}
        assert {m.incarnation for m in taken["register"]} <= known  # type: ignore[attr-defined]
        if taken["finish"]:
            assert self.world.row["state"] == JobState.STOPPED
        events = store.events(job_id, limit=10_000)
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        # How much of it a person took is said behind a comma.
        lines = Counter(event["text"].partition(", of it")[0] for event in events if event["kind"] == "recovery")
        for message in taken["recovered"]:
            text = f"generation {message.generation}: training resumed 1.0 ms after {message.worker} died"  # type: ignore[attr-defined]
            assert lines[text] == 1, f"{text!r} is in the feed {lines[text]} times"
        audits = Counter(row["action"] for row in AuditStore(store.database).read(limit=5000, job_id=job_id))
        assert all(audits[action] >= count for action, count in self.accepted_audits.items())
        generations = store.generations(job_id)
        assert [row["generation"] for row in generations] == list(range(1, len(generations) + 1)) and len(
            generations
        ) == self.state.generation
        for row in generations:
            assert store.plan(row["plan_fingerprint"])
            assert sorted((*row["living"], *row["failed"])) == sorted(NAMES)
        commands = [(c.seq, c.kind, c.worker) for c in self.world.job.commands.sent]
        assert commands == [(row["seq"], row["kind"], row["worker"] or None) for row in store.commands(job_id)]


_ROUTES = ("register", "failures", "acknowledge", "committed", "recovered", "finish")


def key(message: Message | dict[str, object], *fields: str) -> tuple[object, ...]:
    row = message if isinstance(message, dict) else message.model_dump()
    return tuple(row[f] for f in fields)


def durable(state: State) -> object:
    """What a state is made of, but for times and for what is worked out again."""
    members = {
        n: (m.state, m.incarnation, m.retired, m.generation, m.acknowledged, m.draining, m.detail, m.leaving, m.let_go)
        for n, m in state.members.items()
    }
    broken = (state.broken.reporter, state.broken.worker, state.broken.detail) if state.broken else None
    moves, current = state.pending.moves if state.pending else (), state.current
    if current is not None:  # who is gone for good is not stored with the generation
        there = {m.incarnation for m in state.members.values() if m.state is not WorkerState.FAILED}
        current = replace(current, incarnations={n: i for n, i in current.incarnations.items() if i in there})
    life = (state.over, state.over_reason, state.halted, state.unheard, state.mode, state.choice_timeout)
    held = (state.frozen_by, state.held, state.moved)
    return members, current, state.committed, broken, moves, life, held
