"""The words and figures of the pages, computed from views and plans, without Streamlit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrecycle.agent.coordination.membership import ACK_ORDER, START, back_to
from openrecycle.agent.messages.protocol import JobSpec, JobState
from openrecycle.app.charts import text
from openrecycle.app.charts.gantt import MAX_NODES
from openrecycle.app.console.view import JobView, WorkerView
from openrecycle.app.jobs.live_job import INTERIM, LAST
from openrecycle.app.jobs.states import ALIVE, HOLDING, OUT, Condition, Loss, RoleState, lost_name, words_of
from openrecycle.app.jobs.throughput import Baseline, has_settled, recent_rate, share_of
from openrecycle.app.observing.as_run import MeasuredIteration
from openrecycle.planner.jobs.job import SECONDS, Job
from openrecycle.planner.jobs.words import names
from openrecycle.planner.plans.plan import Plan
from openrecycle.planner.plans.schedule import Schedule, critical_path, waited

OVER = (JobState.FINISHED, JobState.STOPPED)
# Words for how far a worker that does not train yet has taken up a generation, in the order of ACK_ORDER.
STEP_WORDS = ("yet to take it up", "with the plan", "in groups")
# Words in a cell while its worker takes up a new generation: the last worker must not look as if all were well.
TRAINS = (RoleState.RUNNING, RoleState.REROUTED, RoleState.SLOW)
ROLLING = {"": "waits", "adopted": "has the plan", "formed": "in its groups"}
DRAG_WORDS = "Drag over a part of a chart to see it large; double-click for all."

SOLVER_WORDS = {
    "auto": "All, the best in the time",
    "list": "List scheduler (fast)",
    "cp-sat": "CP-SAT (may prove it optimal)",
    "milp": "MILP (small grids)",
}


# Shares of the fault-free throughput: from WELL on the tone is good, from HALF on it is a warning, and below it is bad.
WELL, HALF = 0.98, 0.5


@dataclass(frozen=True)
class Card:
    """One figure of the top row. tone: "", "good", "warn" or "bad"; it colours the note."""

    label: str
    value: str
    note: str = ""
    tone: str = ""
    of: str = ""


def fault_free_rate(view: JobView) -> Baseline | None:
    """Returns the rate that throughput is compared with; None while it is not known."""
    return view.figures.baseline if view.figures else None


def live_cards(view: JobView) -> list[Card]:
    """Returns Live's cards: iteration, throughput, goodput, workers, plan in force, age of data."""
    return [_iteration(view), _throughput(view), _goodput(view), _workers(view), _plan(view), _age(view)]


def ready_words(view: JobView) -> str:
    """Says how many plans are ready for the next loss. "": the job is over.

    It is never empty before that: Streamlit draws no empty container, and everything below would move up by 52 pixels,
    as in the moment when it is found out anew which plans are needed after a return or a move of layers."""
    if view.state in OVER:
        return ""
    if not view.plans_to_make:
        return "Plans made ahead: none yet."
    done = view.planned_ahead >= view.plans_to_make
    made = f"{view.plans_to_make:,}" if done else f"{view.planned_ahead:,} of {view.plans_to_make:,}"
    out = any(w.state in OUT for w in view.workers)
    return f"Plans made ahead: {made}." + ("" if out else " When a worker is lost, the options are shown here.")


def _iteration(view: JobView) -> Card:
    done = view.iterations[-1].iteration + 1 if view.iterations else 0
    total = view.spec.iterations
    if view.state is JobState.FINISHED and not done:
        return Card("Iterations done", "–", "none was left to do", of=f"of {total:,}")
    if view.state in OVER:
        note = "all done" if view.state is JobState.FINISHED else "stopped"
    else:
        loss = view.iterations[-1].loss if view.iterations else None
        note = f"loss {loss:.4f}" if loss is not None else "without a loss" if done else "no loss yet"
    return Card("Iterations done", f"{done:,}", note, of=f"of {total:,}")


def _no_iteration(view: JobView) -> str:
    return "no iteration was done" if view.state in OVER else "no iteration done yet"


def _goodput(view: JobView) -> Card:
    """Shows goodput and ETTR in one card; they differ by the cost of re-routing."""
    figures = view.figures
    if figures is None or figures.ettr is None:
        return Card("Goodput so far", "–", _no_iteration(view))
    note = f"ETTR {text.percent(figures.ettr)} of {text.milliseconds(1000 * figures.wall)}"
    if figures.waited >= 1:
        note += f"; apart from it waited {text.milliseconds(1000 * figures.waited)} for a person"
    if figures.goodput is None:
        unknown = "no fault-free rate" if view.state in OVER else "no fault-free rate yet"
        return Card("Goodput so far", "–", note, of=unknown)
    return Card("Goodput so far", text.percent(figures.goodput), note, of="of fault-free")


def is_old(view: JobView) -> bool:
    """Says whether no worker that should send heartbeats was heard in time, so that the data is old. A console that
    stands still does not know the job's state, but does not suspect workers for that."""
    return view.state not in OVER and min(_ages(view), default=0.0) > view.suspect_seconds


def _ages(view: JobView) -> list[float]:
    """Returns the seconds since each worker was heard."""
    return [w.heartbeat_age for w in view.workers if w.heartbeat_age is not None and w.state not in OUT]


def _age(view: JobView) -> Card:
    """Shows the age of the newest heartbeat of all workers, and the age of the last heartbeat of the most silent
    one."""
    if view.state in OVER:
        return Card("Age of data", "–", "the job is over")
    ages = _ages(view)
    if not ages:
        return Card("Age of data", "–", "no worker heard yet")
    newest, oldest = min(ages), max(ages)
    tone = "warn" if oldest > view.suspect_seconds else ""
    words = text.seconds(newest)
    return Card("Age of data", words, f"oldest heartbeat {text.age(oldest)}", tone)


def _throughput(view: JobView) -> Card:
    now = recent_rate(view.iterations)
    if now is None:
        return Card("Throughput", "–", _no_iteration(view))
    if view.state in OVER:
        return Card("Throughput", "–", f"{text.rate(now)} samples/s before the end")
    if view.state is JobState.HALTED:
        return Card("Throughput", "0", f"{text.rate(now)} before the halt", "bad", of="samples/s")
    if view.condition is Condition.WAITING:
        return Card("Throughput", "0", f"waits for a choice; {text.rate(now)} before", "warn", of="samples/s")
    if view.condition is Condition.PAUSING:
        return Card("Throughput", text.rate(now), "pausing; before the pause", of="samples/s")
    if view.condition is Condition.PAUSED:
        return Card("Throughput", "0", f"paused; {text.rate(now)} before the pause", of="samples/s")
    if view.state is JobState.RECOVERING:
        return Card("Throughput", text.rate(now), "before this change; recovering", "warn", of="samples/s")
    if view.condition is Condition.SILENT:
        return Card("Throughput", text.rate(now), "before workers fell silent", "warn", of="samples/s")
    if not has_settled(view.iterations):
        return Card("Throughput", text.rate(now), "first iteration after a change, wait included", of="samples/s")
    share = share_of(now, view.figures)
    if share is None:
        return Card("Throughput", text.rate(now), "fault-free rate not measured yet", of="samples/s")
    # A job that trains without some workers is not well, however quick it is. With old data, or while nothing can be
    # stored, that is not known.
    whole = view.condition is not Condition.DEGRADED and not is_old(view) and not view.unstorable
    tone = ("good" if whole else "warn") if share >= WELL else "warn" if share >= HALF else "bad"
    return Card("Throughput", text.rate(now), f"{text.percent(share)} of fault-free", tone, of="samples/s")


def _workers(view: JobView) -> Card:
    """Shows how many workers live, and what became of the other processes."""
    total, states = len(view.workers), [w.state for w in view.workers]
    living = total - sum(state in OUT for state in states)
    if view.state in OVER:
        return Card("Living workers", "–", f"{living:,} of {total:,} before the end")
    held = {w.name for w in view.workers if w.state not in OUT}
    going = {w.name for w in view.workers if w.state is RoleState.LEAVING}
    lost = [(lost_name(p, p.slot in held), "leaving" if p.role in going else p.ended) for p in view.missing]
    failed, drained, leaving = ([n for n, how in lost if how == end] for end in ("failed", "drained", "leaving"))
    suspect = [w.name for w in view.workers if w.state is RoleState.SUSPECT]
    joining = [w.name for w in view.workers if w.state is RoleState.JOINING]
    unregistered = sum(w.state is RoleState.EMPTY for w in view.workers) if not view.generation else 0
    gone = ("failed", failed), ("drained", drained), ("leaving", leaving)
    parts = [f"{words}: {names(out, 3, ' and ')}" for words, out in gone if out]
    if view.moved:
        parts.append(f"moved: {names([f'{p.slot} to {p.role}' for p in view.moved], 2, ' and ')}")
    if suspect:
        parts.append(f"suspect: {names(suspect, 3, ' and ')}")
    if joining:
        parts.append(f"joining: {names(joining, 3, ' and ')}")
    if unregistered:
        parts.append(f"{unregistered:,} still to register")
    warn = drained or leaving or suspect or (joining and view.generation)
    tone = "bad" if failed else "warn" if warn else ""
    if not parts and living < total:
        parts = [f"{total - living:,} empty"]
    if not parts and view.unstorable:
        parts = ["none is known to be lost"]  # a worker that dies meanwhile can't be stored as lost
    note, tone = ("; ".join(parts), tone) if parts else ("none lost", "good")
    return Card("Living workers", f"{living:,}", note, tone, of=f"of {total:,}")


def _plan(view: JobView) -> Card:
    plan = view.plan
    if plan is None:
        made = f"{view.planned_ahead} of {view.plans_to_make} made" if view.plans_to_make else "waits for all workers"
        return Card("Plan in force", "–", made)
    period = text.planned(plan.metrics.period, plan.job.time_unit)
    rolled = roll_out(view)
    against = f"{text.percent(plan.metrics.slowdown_vs_1f1b, sign=True)} vs 1F1B"
    gap = "proven optimal" if plan.metrics.gap <= 0 else f"gap ≤ {text.at_most(plan.metrics.gap)}"
    note = rolled or f"{against}, {gap}"
    joining = [w.name for w in view.workers if w.state is RoleState.JOINING]
    there = f"{names(joining, 3, ' and ')} {'has' if len(joining) == 1 else 'have'} the state"
    there = there if joining else "layers have moved"
    if view.plan_words == INTERIM:
        note = f"until {there}; {against}"
    title = {INTERIM: "Interim plan", LAST: "Last plan in force"}
    head = title.get(view.plan_words, "Plan in force")
    if view.condition is Condition.WAITING:
        head, note = "Plan until now", "nothing trains until somebody chooses"
    elif view.state is JobState.HALTED:
        head, note = "Plan until now", "the job is halted"
    return Card(f"{head} · generation {view.generation}", period, note, "warn" if rolled else "", of="period")


def roll_out(view: JobView) -> str:
    """Says how far the workers have taken up the newest generation; "": all train in it."""
    steps = [w.acknowledged for w in view.workers if w.generation == view.generation and w.state in ALIVE]
    if view.state is not JobState.RECOVERING or all(s == "resumed" for s in steps):
        return ""
    return roll_out_words([steps.count(step) for step in ACK_ORDER])


def roll_out_words(at: Sequence[int]) -> str:
    """Says how many workers train by the newest plan, and how far the others have taken it up. at: for each step of
    ACK_ORDER, how many have come to it and no further."""
    *others, train = at
    found = [f"{count:,} {words}" for count, words in zip(others, STEP_WORDS, strict=True) if count]
    return f"{train:,} of {text.count(sum(at), 'worker')} train by it so far; {', '.join(found)}"


def gap_words(plan: Plan) -> str:
    """Says how far the plan may be from the best possible."""
    if plan.metrics.gap <= 0:
        return "proven optimal"
    return f"at most {text.at_most(plan.metrics.gap)} over optimal"


def plan_cards(plan: Plan, schedule: Schedule) -> list[Card]:
    """Returns a plan's cards: period, bound, bubbles, slowdowns, re-routed work, memory."""
    metrics, unit = plan.metrics, plan.job.time_unit
    moved = sum(schedule.rerouted_forwards.values())
    total = plan.job.pipelines * plan.job.stages * plan.job.micro_batches
    makespan, slot = f"makespan {text.planned(metrics.makespan, unit)}", slot_of(schedule.problem.job)
    slots = f"= {text.planned(round(metrics.period / slot, 1), 'slot')}" if slot else ""
    each = f"of {text.planned(slot, unit)} each; " if slot else ""
    cut = f"; layers per stage {text.counts(plan.partition)}" if plan.partition else ""
    return [
        Card("Period", text.planned(metrics.period, unit), each + makespan + cut, of=slots),
        Card(
            "Gap to the bound",
            text.percent(max(metrics.gap, 0)),
            f"{'proven optimal' if metrics.gap <= 0 else 'bound'}: {text.planned(metrics.lower_bound, unit)}",
            "good" if metrics.gap <= 0 else "",
        ),
        Card(
            "Period vs fault-free",
            text.percent(metrics.slowdown_vs_1f1b, sign=True),
            f"{text.percent(metrics.slowdown_vs_best, sign=True)} vs the best fault-free plan",
            of="vs 1F1B",
        ),
        Card("Bubbles", text.percent(metrics.bubble_fraction), "of living workers' time"),
        Card("Re-routed", f"{moved:,}", "micro-batch visits to peers", of=f"of {total:,}"),
        _peak(plan, schedule),
    ]


def slot_of(job: Job) -> float | None:
    """Returns the duration that F, I and W have on all stages, in the job's unit; None if they differ, or if that unit
    is the slot itself."""
    times = {time for p in job.profiles for time in (p.forward, p.input_backward, p.weight_backward)}
    return times.pop() if len(times) == 1 and job.time_unit != "slot" else None


def _peak(plan: Plan, schedule: Schedule) -> Card:
    """Shows the peak memory in bytes if the profile has sizes, else in activations."""
    held = max(plan.metrics.peak_activations.values(), default=0)
    if not schedule.counts_bytes:
        return Card("Peak activations", f"{held:,}", f"memory limit: {plan.memory}", of="held")
    worker, peak = max(schedule.peak_bytes.items(), key=lambda item: item[1])
    held, capacity = schedule.peak_activations[worker], schedule.problem.job.capacity_bytes
    note = f"on {worker}; {text.count(held, 'activation')} held at most"
    return Card("Peak memory", text.size(peak), note, of=f"of {text.size(capacity[worker.stage])}" if capacity else "")


def living_peers(view: JobView, worker: WorkerView) -> list[str]:
    """Returns the other workers of the same stage that hold its weights."""
    return [w.name for w in view.workers if w.stage == worker.stage and w.name != worker.name and w.state in HOLDING]


def process_words(worker: WorkerView) -> str:
    """Says which process holds the role."""
    if not worker.pid:
        return "its process"
    began = f", started as {worker.slot}" if worker.slot not in ("", worker.name) else ""
    return f"process {worker.pid} on {worker.host}{began}"


STOPS = "This kill stops the job."
STANDS_STILL = "The job stands still after this kill."


def consequence_of_kill(view: JobView, worker: WorkerView, loss: Loss) -> tuple[str, str]:
    """Says in a few sentences what killing `worker` does, and what to warn of; "": the job goes on by itself."""
    again, warning = _started_again(view.spec.max_restarts), ""
    where = back_to(view.spec.checkpoints, view.spec.max_restarts)
    redone = f"all go back to {where}; the iterations since then are run again"
    if where == START:
        redone = "all begin anew"
    others = f"No other worker of stage {worker.stage} lives"
    if peers := living_peers(view, worker):
        others = "Another stage has no worker that lives"
    if not view.generation:
        words = "The job has not begun. It waits until this worker is started again."
    elif worker.state is RoleState.JOINING and not (loss.halts or loss.restore):
        words = "It does not train yet: nothing changes for the others."
    elif loss.halts and again:
        words, again = f"{others}: the job stands still. {again} Then {redone}.", ""
    elif loss.halts and where:
        words = f"{others}, and no stage can spare one: the job halts. Started again, it goes on from {where}."
        warning = STANDS_STILL
    elif loss.halts:
        words = f"{others}: its weights go with it, nobody can take over its micro-batches, and the job halts."
        warning = STOPS
    elif loss.restore and loss.by:
        words = f"{others}. {loss.by} takes its place, and {redone}."
    elif loss.restore:
        words = f"{text.capital(redone)}."
    else:
        words = (
            f"{_load(view, worker, peers, loss.share)} The iteration in flight is redone; no update is lost, and the "
            "other workers keep their processes."
        )
    return f"{words} {again}".rstrip(), warning


def _started_again(max_restarts: int) -> str:
    """Says what a launcher does about a worker that has died; "": nothing."""
    if not max_restarts:
        return ""
    times = "once" if max_restarts == 1 else f"{max_restarts:,} times in a row"
    return f"Its launcher starts it again by itself, unless it has done so {times} already."


def _load(view: JobView, worker: WorkerView, peers: list[str], share: float | None) -> str:
    load = view.spec.micro_batches + worker.takes_rerouted
    left = f"; about {text.percent(share)} of fault-free throughput is left" if share is not None else ""
    return f"Its {text.count(load, 'micro-batch', 'micro-batches')} go to {names(peers, 6, ' and ')}{left}."


def consequence_of_drain(view: JobView, worker: WorkerView, share: float | None = None) -> str:
    """Says in a sentence or two what draining `worker` does. share: the share of the fault-free throughput that is left
    then; None: not known."""
    return (
        f"It leaves when the iteration in hand is done; nothing is redone, and it counts as no failure. "
        f"{_load(view, worker, living_peers(view, worker), share)} It can be started again later."
    )


def consequence_of_restart(view: JobView, worker: WorkerView) -> tuple[str, bool]:
    """Says in a sentence what starting `worker` again does, and returns whether it can help."""
    peers, nobody = living_peers(view, worker), f"No worker of stage {worker.stage} lives"
    if not view.generation:
        return "A new process is started. The job begins when all workers have registered.", True
    if not peers and (where := back_to(view.spec.checkpoints, view.spec.max_restarts)):
        return f"{nobody}. Once this one is back, all workers go back to {where}.", True
    if not peers:
        return f"{nobody}, so nobody can give it the weights. Start the job again.", False
    return (
        f"A new process takes weights, optimizer state and iteration from a living peer of stage {worker.stage} "
        f"({names(peers, 6, ' and ')}) and joins at the end of an iteration. It then runs its own micro-batches again.",
        True,
    )


def op_time_words(spec: JobSpec) -> str:
    """Returns the op times of the job's plans: `F 40 ms, I 12 ms to 40 ms`; "": they are in slots. Kinds that take no
    time are left out."""
    kinds = {"F": "forward", "I": "input_backward", "W": "weight_backward", "O": "optimizer"}
    spans: dict[str, tuple[float, float]] = {kind: (ms, ms) for kind, ms in spec.durations.items()}
    if spec.profile is not None:
        unit = 1000 * SECONDS.get(spec.profile.time_unit, 0.0)
        for kind, name in kinds.items():
            times = [unit * getattr(stage, name) for stage in spec.profile.profiles]
            spans[kind] = min(times), max(times)
    words = {kind: (text.milliseconds(low), text.milliseconds(high)) for kind, (low, high) in spans.items() if high}
    return ", ".join(f"{kind} {low}" + (f" to {high}" if high != low else "") for kind, (low, high) in words.items())


def tile_words(worker: WorkerView) -> str:
    """Returns the second line of a worker's cell."""
    if worker.state in TRAINS and worker.acknowledged in ROLLING:
        return ROLLING[worker.acknowledged]
    match worker.state:
        case RoleState.REROUTED:
            return f"+{worker.takes_rerouted} re-routed"
        case RoleState.SLOW:
            return f"slow, {worker.slow:.1f} ×"
    if worker.state is RoleState.SUSPECT and worker.heartbeat_age is not None:
        return f"suspect, {text.seconds(worker.heartbeat_age)}"
    spare = f", {worker.spare} spare" if worker.spare else ""
    return words_of(worker.state, worker.moved_to) + spare


def schedule_words(plan: Plan, schedule: Schedule) -> str:
    """Describes the Gantt chart for people who can't see it."""
    moved = sum(schedule.rerouted_forwards.values())
    unit = plan.job.time_unit
    return (
        f"Gantt chart of {plan.job.pipelines} pipelines by {plan.job.stages} stages, "
        f"{plan.job.micro_batches} micro-batches each. Workers out: {names(plan.failed, 12, ' and ') or 'none'}. "
        f"Re-routed micro-batches: {moved}. Period {text.planned(plan.metrics.period, unit)}, "
        f"makespan {text.planned(plan.metrics.makespan, unit)}."
    )


def reading_help(plan: Plan) -> str:
    """Says how to read the chart, in a few sentences."""
    words = "A number in a bar is the micro-batch; a grey track is a bubble."
    if plan.failed:
        words += " A hatched bar is re-routed: 1·3 means micro-batch 3 of pipeline 1, run in place of its own worker."
    if plan.technique.staggers:
        words += (
            " Faint bars are the next iteration: each stage steps on its own, so it may begin on one stage before "
            "this one has ended on another. That is why the period can be shorter than the makespan."
        )
    return f"{words} {DRAG_WORDS}"


def measured_words(measured: MeasuredIteration) -> str:
    """Says which iteration it is, and how it compares with the plan that it ran."""
    words = f"**Iteration {measured.iteration:,}** as it ran in generation {measured.generation}"
    if measured.period_ms is not None:
        words += f"; iterations around it took {text.milliseconds(measured.period_ms)} from commit to commit"
    if measured.over_plan is not None and measured.planned_ms is not None:
        over = text.percent(measured.over_plan, sign=True)
        words += f", planned {text.milliseconds(measured.planned_ms)} ({over})"
    if measured.uncertainty_ms:
        words += f". Times of different hosts may be off by {text.milliseconds(measured.uncertainty_ms)}"
    return words + "."


def critical_words(schedule: Schedule) -> str:
    """Says in a sentence or two which ops determine the period."""
    path, job = critical_path(schedule), schedule.problem.job
    unit = job.time_unit
    still = waited(path)
    whole = path[-1].op.end - path[0].op.start + path[0].waited
    workers = list(map(str, sorted({link.op.worker for link in path})))
    named = ", ".join(workers[:6]) + (f" and {len(workers) - 6} more" if len(workers) > 6 else "")
    words = (
        f"Critical path: {text.count(len(path), 'op')} on {named}, {text.planned(job.units(whole), unit)} from "
        f"end to end; each op starts when the one before it lets it."
    )
    if still:
        idle = text.planned(job.units(still), unit)
        return f"{words} For {idle} of that nothing runs on it (outlined): an op waits for its turn, or for memory."
    return words + " It never waits, so only shorter ops, or another order, would make the period shorter."


def many_words(ops: int, instead: str) -> str:
    """Says what a chart lacks if it has too many ops for an element each. instead: what to do about it."""
    return (
        f"All {ops:,} ops are drawn; so many have no numbers and can't be clicked. Point at one to read what it is, or "
        f"{instead}: up to {MAX_NODES:,} ops have both."
    )
