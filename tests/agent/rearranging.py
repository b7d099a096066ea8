"""Who decides on generations, and wants other layers in some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from openrecycle.agent.coordination.launcher import Deploy
from openrecycle.agent.coordination.launcher import Event as Order
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.job import Worker


class Rearranging(LocalCoordination):
    """Wants other layers from some generations on."""

    partitions: ClassVar[dict[int, tuple[int, ...]]] = {}

    def __init__(self, catalog: Catalog, **options: Any) -> None:
        super().__init__(catalog, **options)
        self.catalog = catalog

    def poll(self, now: float) -> list[Order]:
        return [self._rearranged(order) if isinstance(order, Deploy) else order for order in super().poll(now)]

    def _rearranged(self, order: Deploy) -> Deploy:
        newest = max((n for n in self.partitions if n <= order.deployment.generation), default=None)
        if newest is None:
            return order
        plan, _ = self.catalog.at(self.partitions[newest]).plan_for(map(Worker.parse, order.deployment.failed))
        deployment = order.deployment.model_copy(update={"plan_fingerprint": plan.fingerprint})
        return replace(order, plan=plan, deployment=deployment)


def rearranging(partitions: dict[int, tuple[int, ...]]) -> type[Rearranging]:
    """partitions: by the generation from which on they are wanted."""
    return type("Decides", (Rearranging,), {"partitions": partitions})
