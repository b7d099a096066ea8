"""Who decides on generations, and wants other layers in some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from openrecycle.agent.coordination.launcher import Deploy
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.planner.jobs.job import Worker


class Rearranging(LocalCoordination):
    """Wants other layers from some generations on."""

    partitions: ClassVar[dict[int, tuple[int, ...]]] = {}

    def _open(self, generation: Any) -> None:
        super()._open(generation)
        newest = max((n for n in self.partitions if n <= generation.number), default=None)
        if newest is not None:
            last = self._orders[-1]
            assert isinstance(last, Deploy)
            lost = map(Worker.parse, last.deployment.failed)
            plan, _ = self._catalog.at(self.partitions[newest]).plan_for(lost)
            deployment = last.deployment.model_copy(update={"plan_fingerprint": plan.fingerprint})
            self._orders[-1] = replace(last, plan=plan, deployment=deployment)


def rearranging(partitions: dict[int, tuple[int, ...]]) -> type[Rearranging]:
    """partitions: by the generation from which on they are wanted."""
    return type("Decides", (Rearranging,), {"partitions": partitions})
