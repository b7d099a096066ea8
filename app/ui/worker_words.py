"""A worker's details as HTML: facts, states over time, op times, log. No Streamlit here.

Every text that comes from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import groupby

from openrecycle.agent.messages.protocol import Doing
from openrecycle.app.console.view import WorkerView
from openrecycle.app.console.worker_detail import StateInterval, WorkerDetail
from openrecycle.app.console.worker_history import Series
from openrecycle.app.ui import text
from openrecycle.app.ui.charts.worker_grid import LOOKS
from openrecycle.app.workers.states import OUT, RankState, RoleState
from openrecycle.planner.jobs.words import names
from openrecycle.planner.plans.drawing import OP_WORDS

# The table below the bar shows so many stays, the newest.
NEWEST = 8


def facts_html(detail: WorkerDetail) -> str:
    worker = detail.worker
    layers = text.layers(detail.held, worker.stage) if detail.held else ""
    if detail.coming and (then := text.layers(detail.coming, worker.stage)) != layers:
        layers += f", soon {then}"
    gone = worker.state in OUT and worker.state is not RoleState.LEAVING
    rows = {
        "State": LOOKS[worker.state][0] + (f" – {worker.detail}" if worker.detail else ""),
        "Place": f"pipeline {worker.pipeline}, stage {worker.stage}",
        "Layers": f"{layers} of {sum(detail.held)}" if layers and not gone else "",
        "Last iteration" if gone else "Iteration": f"{worker.iteration:,}, generation {worker.generation}"
        + (f", {worker.phase}" if worker.phase else ""),
        "Was at" if gone else "At": doing(worker.doing, limit=not gone) if worker.doing else "",
        "Re-routed work": text.count(worker.takes_rerouted, "micro-batch", "micro-batches") + " per iteration"
        if worker.takes_rerouted
        else "",
        "Last heartbeat": text.age(worker.heartbeat_age),
        "Process": _process(worker),
        "Ranks": _ranks(detail),
        "Memory in use": text.size(worker.resident_bytes) if worker.resident_bytes else "",
        "Activations, by plan": f"at most {text.count(detail.activations, 'micro-batch', 'micro-batches')} at once"
        if detail.activations is not None
        else "",
    }
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows.items() if v)
    return f'<dl class="or-facts">{items}</dl>'


def doing(at: Doing, *, limit: bool = True) -> str:
    """What its training thread is at: `forward of micro-batch 1.3 for 2.1 s, may take 10.0 s`. limit: with the last."""
    names = {"waiting": "waiting for a peer", "data": "loading data", "validation": "settling the last step"}
    what = OP_WORDS.get(at.kind, names.get(at.kind, at.kind))
    of = "" if at.micro_batch is None or at.kind == "waiting" else f" of micro-batch {at.pipeline}.{at.micro_batch}"
    most = "" if at.limit is None or not limit else f", may take {at.limit:.1f} s"
    return f"{what}{of} for {at.seconds:.1f} s{most}"


def _process(worker: WorkerView) -> str:
    """The machine's side: which process, since when, and where it was started; or where it went."""
    if worker.moved_to:
        return f"none: it holds {worker.moved_to} now"
    if not worker.pid:
        return ""
    words = f"{worker.pid} on {worker.host}"
    if worker.slot != worker.name:
        words += f", started as {worker.slot}"
    return f"{words}; it has ended" if worker.state in (RoleState.FAILED, RoleState.DRAINED) else words


def _ranks(detail: WorkerDetail) -> str:
    if not detail.ranks:
        return ""
    spare = sum(rank.state is RankState.SPARE for rank in detail.ranks)
    words = f"{len(detail.ranks)}, which share each layer; the process is rank 0"
    if any(rank.state is not RankState.RUNNING for rank in detail.ranks):
        words = str(len(detail.ranks))
    if spare:
        words = f"{len(detail.ranks)}, of which {spare} {'is' if spare == 1 else 'are'} spare"
    if detail.made_of:
        words += f"; made of what was left of {names(detail.made_of, last=' and ')}"
    return words


_OF_RANKS = {
    RankState.RUNNING: ("running", "runs"),
    RankState.DEAD: ("failed", "has ended"),
    RankState.SPARE: ("empty", "spare: ended with its worker, and nothing runs in its place"),
    RankState.USED: ("moved", "was spare; in its place runs a rank of {}"),
}


def ranks_html(detail: WorkerDetail) -> str:
    """Each rank's process. Under it what becomes of spare ones."""
    rows = ""
    for rank in detail.ranks:
        look, words = _OF_RANKS[rank.state]
        mark = f'<i class="or-shape or-look-{look}"></i> '
        cells = (f"{rank.pid}", escape(rank.host), mark + escape(words.format(rank.used_by)))
        rows += f"<tr><th scope='row'>{rank.number}</th>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    heads = "".join(f"<th scope='col'>{head}</th>" for head in ("Rank", "process", "host", "state"))
    note = ""
    if any(rank.state is RankState.SPARE for rank in detail.ranks):
        note = (
            f'<div class="or-quiet">{len(detail.ranks)} spare ranks on one node make a worker again, by themselves, in '
            "the stage that has the fewest. Those of different nodes don't.</div>"
        )
    return (
        f'<table class="or-table or-ranks"><caption>Ranks</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{note}"
    )


def op_times_html(detail: WorkerDetail) -> str:
    """Measured op times beside the plan's and the peers'."""
    rows = ""
    for op in detail.op_times:
        cells = [text.milliseconds(op.measured)]
        for other in (op.planned, op.peers):
            if other is None:
                cells.append("–")
            else:
                share = f" ({text.percent(op.measured / other - 1, sign=True)})" if other > 0 else ""
                cells.append(text.milliseconds(other) + share)
        rows += f"<tr><th>{OP_WORDS[op.kind]}</th>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"
    return (
        '<table class="or-table"><caption>Op times, smoothed over the last heartbeats</caption>'
        "<thead><tr><th>Op</th><th>measured</th><th>plan</th><th>median of its peers</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def over_time_html(series: Series, planned: Mapping[str, float]) -> str:
    """The charts' figures: lowest, mean and highest of all heartbeats, and the plan's. planned: ms by op kind."""
    rows = ""
    for kind, words in OP_WORDS.items():
        if kind in series.metrics:
            shown = [*map(text.milliseconds, _figures(series, kind))]
            shown.append(text.milliseconds(planned[kind]) if kind in planned else "–")
            rows += f"<tr><th scope='row'>{words}</th>" + "".join(f"<td>{cell}</td>" for cell in shown) + "</tr>"
    if "resident_bytes" in series.metrics:
        cells = "".join(f"<td>{text.size(round(value))}</td>" for value in _figures(series, "resident_bytes"))
        rows += f"<tr><th scope='row'>Memory</th>{cells}<td>–</td></tr>"
    heads = "".join(f"<th scope='col'>{head}</th>" for head in ("", "lowest", "mean", "highest", "plan"))
    caption = f"{text.count(sum(series.beats), 'heartbeat')} in this time"
    return (
        f'<table class="or-table"><caption>{caption}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _figures(series: Series, name: str) -> tuple[float, float, float]:
    """Lowest, mean weighted by heartbeats, highest."""
    metric = series.metrics[name]
    weighted = [(mean, n) for mean, n in zip(metric.mean, series.beats, strict=True) if mean is not None]
    return (
        min(v for v in metric.low if v is not None),
        sum(mean * n for mean, n in weighted) / sum(n for _, n in weighted),
        max(v for v in metric.high if v is not None),
    )


def stays_html(detail: WorkerDetail, zone: str | None, now: float) -> str:
    """A bar to scale, and the newest changes in words."""
    stays = [s for s in detail.stays if s.state != RoleState.EMPTY] or list(detail.stays)
    if not stays:
        return '<div class="or-quiet">No change of state is recorded.</div>'
    begin, end = stays[0].begin, stays[-1].end
    whole = max(end - begin, 1e-9)
    bar = "".join(
        f'<i class="or-in-{escape(state)}" style="width:{100 * sum(s.end - s.begin for s in group) / whole:.3f}%"></i>'
        for state, group in _runs(stays)
    )
    rows = "".join(
        f'<li><time>{text.moment(s.begin, zone, now)}</time><i class="or-shape or-look-{escape(s.state)}"></i>'
        f"<span>{escape(_words(s.state))}</span><span>{_lasted(s)}</span></li>"
        for s in reversed(stays[-NEWEST:])
    )
    words = f"States from {text.moment(begin, zone, now)} until now"
    return f'<div class="or-stays" role="img" aria-label="{words}">{bar}</div><ol class="or-changes">{rows}</ol>'


def _runs(stays: list[StateInterval]) -> list[tuple[str, list[StateInterval]]]:
    return [(state, list(group)) for state, group in groupby(stays, lambda s: s.state)]


def _words(state: str) -> str:
    return LOOKS[RoleState(state)][0] if state in LOOKS else state


def _lasted(stay: StateInterval) -> str:
    return text.milliseconds(1000 * (stay.end - stay.begin))


def log_html(detail: WorkerDetail, zone: str | None, now: float) -> str:
    if not detail.log:
        return (
            '<div class="or-quiet">Nothing yet. What the worker\'s process prints comes here with its '
            "heartbeats; the console keeps the newest lines in memory.</div>"
        )
    rows = "".join(
        f"<li><time>{text.moment(line.at, zone, now)}</time> {escape(line.text)}</li>" for line in detail.log
    )
    return f'<ol class="or-lines" tabindex="0" aria-label="Log, oldest first">{rows}</ol>'
