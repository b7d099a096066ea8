"""The policies that play measured tables, by the name that `--policy` takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from openrecycle.planner.errors import InputError
from openrecycle.planner.simulation.policies.bamboo_table import BambooTable
from openrecycle.planner.simulation.policies.measured import Measured
from openrecycle.planner.simulation.policies.oobleck_table import OobleckTable
from openrecycle.planner.simulation.policies.recycle_table import ReCycleTable
from openrecycle.planner.simulation.policies.varuna_table import VarunaTable
from openrecycle.planner.simulation.tables import Costs, NodeTable, read_costs, read_throughput

# name: (the system whose rows it reads, how it is made)
PUBLISHED: dict[str, tuple[str, Callable[[NodeTable, Costs], Measured]]] = {
    "oobleck": ("oobleck", OobleckTable),
    "varuna": ("varuna", VarunaTable),
    "bamboo": ("bamboo", BambooTable),
    "bamboo-corrected": ("bamboo", partial(BambooTable, corrected=True)),
    "recycle": ("recycle", ReCycleTable),
}


def published(name: str, throughput: Path, costs: Path, model: str) -> Measured:
    """A fresh policy for one run. Raises InputError."""
    if name not in PUBLISHED:
        raise InputError("--policy", name, "with --throughput one of " + ", ".join(PUBLISHED))
    system, make = PUBLISHED[name]
    return make(read_throughput(throughput, system, model), read_costs(costs, system, model))
