"""How a node goes on as the lead: from its copy, its workers, and what they have said since, to a launcher's pool."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from openrecycle.agent.launcher.launch import Takeover
from openrecycle.agent.launcher.processes import WorkerProcess, preload
from openrecycle.agent.launcher.record import REMEMBERED
from openrecycle.agent.nodes.placement import place
from openrecycle.agent.nodes.pool import NodeHub, SpreadPool
from openrecycle.agent.nodes.succession import Copy, Lead, Spool
from openrecycle.agent.workers.spec import RunSpec
from openrecycle.planner.jobs.job import Worker
from openrecycle.planner.plans.plan import Plan

FOLLOW_SECONDS = 5.0
"""So long the new lead waits for those that live, and for what their workers have said."""


@dataclass(frozen=True)
class Succession:
    """What a node has that leads from now on. entries: its workers that live, by incarnation. unheard: what they have
    said that may not be in the copy, by incarnation, in order. lost_at: when its lead was lost, in nanoseconds."""

    run: RunSpec
    nodes: int
    hub: NodeHub
    copy: Copy
    record: Spool
    won: Lead
    entries: Mapping[str, WorkerProcess]
    unheard: Mapping[str, Iterable[Mapping[str, Any]]]
    lost_at: int

    def take_over(self) -> tuple[SpreadPool, Takeover]:
        """Waits for the nodes that follow."""
        hub, copy, now = self.hub, self.copy, time.monotonic()
        links = hub.followers(FOLLOW_SECONDS)
        self.record.cut(copy.lines)
        pool = SpreadPool(preload(self.run.workload), hub, place(self.run.options.job, self.nodes), self.record)
        pool.count(copy.nodes)
        document = copy.unpacked()
        lost = dict[Worker, str]()
        for about in document["workers"]:
            cell, incarnation, node = Worker.parse(about["worker"]), about["incarnation"], about["node"]
            if node == hub.standing.rank and incarnation in self.entries:
                entry = self.entries[incarnation]
                entry.worker, entry.heard_at = cell, now
                pool.adopt(entry)
            elif node in links:
                entry = pool.adopt_there(links[node], cell, incarnation, now)
            else:
                lost[cell] = incarnation
                continue
            for name in ("member", "since", "whole", "spoke", "op_limit"):
                setattr(entry, name, about[name])
            entry.came_from = about["came_from"] and Worker.parse(about["came_from"])
            entry.heard = copy.heard.get(incarnation, 0)
        known = {about["incarnation"] for about in document["workers"]}
        for incarnation, entry in self.entries.items():
            if incarnation not in known:
                entry.kill()
        for link in links.values():
            link.had(copy.term, copy.lines)
            link.post({"kind": "resume", "heard": dict(copy.heard), "workers": sorted(known)})
        until = now + FOLLOW_SECONDS

        def others_tell() -> bool:
            with hub.news:
                waiting = [link for link in links.values() if link.alive and not link.resumed]
                if waiting:
                    hub.news.wait(0.02)
            return bool(waiting) and time.monotonic() < until

        text = f"node {copy.lead}, which led, is lost: node {hub.standing.rank} leads from here on"
        return pool, Takeover(
            document=document,
            ahead=copy.ahead,
            plan=Plan.from_json(copy.plan),
            recorded=self.record.newest_losses(REMEMBERED),
            lost=lost,
            lost_at=self.lost_at,
            unheard=list(self._unheard(pool.running.values())),
            others_tell=others_tell,
            text=text,
        )

    def _unheard(self, entries: Collection[WorkerProcess]) -> Iterable[tuple[WorkerProcess, dict[str, Any]]]:
        for entry in entries:
            for item in self.unheard.get(entry.incarnation, ()) if not entry.elsewhere else ():
                message = dict(item.get("message", {}))
                if message.pop("number", 0) > entry.heard:
                    yield entry, message
