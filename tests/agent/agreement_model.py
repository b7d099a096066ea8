"""A model of the agreement, explored to its end: every order in which workers of small grids can work, reduce,
step, die, leave a broken generation and come back, with the product's own `agree` between two generations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from openrecycle.agent.workers.recovery import NoAgreementError, agree
from openrecycle.planner.jobs.job import Worker

Status = Literal["whole", "part", "dead", "out"]
WORKS, REDUCES, REDUCED = range(3)
LEFT = -1
"""It stepped as it left a broken generation: of the next iteration it has run nothing, so nobody has that from it."""


class Cell(NamedTuple):
    """One worker. part: it takes its state from a peer, and works on no micro-batch. dead: since this generation.
    count: iterations committed; phase: how far it is in the next one. undo: it can roll back its last step, as long as
    it has no gradient of the next one."""

    status: Status = "whole"
    count: int = 0
    phase: int = WORKS
    left: bool = False
    undo: bool = False
    new: bool = False

    @property
    def alive(self) -> bool:
        return self.status in ("whole", "part")

    @property
    def in_generation(self) -> bool:
        return self.status != "out"

    def at_least(self, count: int, phase: int) -> bool:
        return (self.count, self.phase) >= (count, phase)


class World(NamedTuple):
    cells: tuple[Cell, ...]
    broken: bool = False
    deaths: int = 0
    returns: int = 0
    certain: int = 0
    """Iterations that all members have committed: these are in the record."""


class Violation(AssertionError):
    pass


@dataclass(frozen=True)
class AgreementModel:
    """lazy: workers that the plan gives no micro-batch while others of their stage live. waits: does a step wait
    for the other stages' reductions (as after a clipped gradient)? barrier, finishes, settles: the rules that make it
    safe: nobody steps before its stage has reduced, who has reduced steps, and nobody has a gradient before every other
    stage has said what it reduced the last time."""

    pipelines: int
    stages: int
    iterations: int
    deaths: int
    returns: int
    lazy: frozenset[Worker] = frozenset()
    waits: bool = False
    barrier: bool = True
    finishes: bool = True
    settles: bool = True
    routes: dict[object, dict[Worker, list[Worker]]] = field(default_factory=dict, repr=False)

    @cached_property
    def workers(self) -> list[Worker]:
        return [Worker(p, s) for p in range(self.pipelines) for s in range(self.stages)]

    def index(self, worker: Worker) -> int:
        return worker.pipeline * self.stages + worker.stage

    def explore(self) -> int:
        """Visits every world; returns how many there are. Raises Violation."""
        start = World((Cell(),) * (self.pipelines * self.stages))
        seen, waiting = {start}, [start]
        while waiting:
            world = waiting.pop()
            for after in self.successors(world):
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return len(seen)

    def successors(self, world: World) -> Iterator[World]:
        routes = self._routes(world)
        for i, worker in enumerate(self.workers):
            cell = world.cells[i]
            if not cell.alive:
                continue
            if not cell.left:
                for after in self._moves(world, worker, cell, routes):
                    yield self._with(world, i, after)
                if cell.status == "part":
                    yield self._with(world, i, cell._replace(status="whole"))
                if world.broken:
                    for after in self._leaves(world, worker, cell):
                        yield self._with(world, i, after._replace(left=True))
            if world.deaths < self.deaths:
                dead = self._with(world, i, cell._replace(status="dead"))
                yield dead._replace(broken=True, deaths=world.deaths + 1)
        alive = [c for c in world.cells if c.alive]
        if world.broken and alive and all(c.left for c in alive):
            yield from self._agreements(world)
        at_iteration_end = len({c.count for c in alive}) == 1 and all(c.phase == WORKS for c in alive)
        if not world.broken and at_iteration_end and world.returns < self.returns:
            yield from self._agreements(world, only_returns=True)

    # -- in a generation ------------------------------------------------------------------------------

    def _routes(self, world: World) -> dict[Worker, list[Worker]]:
        """For each worker that has micro-batches, everybody whom these pass through."""
        current = tuple((c.status, c.new) for c in world.cells)
        if current not in self.routes:
            self.routes[current] = self._routes_among(world)
        return self.routes[current]

    def _routes_among(self, world: World) -> dict[Worker, list[Worker]]:
        paths = []
        for pipeline in range(self.pipelines):
            path = []
            for stage in range(self.stages):
                peers = [Worker(p, stage) for p in range(self.pipelines)]
                able = [w for w in peers if world.cells[self.index(w)].status in ("whole", "dead")]
                able = [w for w in able if not world.cells[self.index(w)].new] or able
                able = [w for w in able if w not in self.lazy] or able
                if not able:
                    return {}
                path.append(Worker(pipeline, stage) if Worker(pipeline, stage) in able else able[pipeline % len(able)])
            paths.append(path)
        return {w: [v for path in paths if w in path for v in path] for path in paths for w in path}

    def _moves(self, world: World, worker: Worker, cell: Cell, routes: dict[Worker, list[Worker]]) -> Iterator[Cell]:
        if cell.count == self.iterations:
            return
        if cell.phase == WORKS:
            needs = (world.cells[self.index(w)] for w in routes.get(worker, ()))
            if all(other.at_least(cell.count, WORKS) for other in needs) and self._settled(world, worker, cell):
                yield cell._replace(undo=False) if cell.undo else cell._replace(phase=REDUCES)
        elif cell.phase == REDUCES:
            if all(peer.at_least(cell.count, REDUCES) for peer in self._peers(world, worker)):
                yield cell._replace(phase=REDUCED)
        elif self._may_step(world, worker, cell) and (
            not self.barrier or all(peer.at_least(cell.count, REDUCED) for peer in self._peers(world, worker))
        ):
            yield _stepped(cell)

    def _leaves(self, world: World, worker: Worker, cell: Cell) -> Iterator[Cell]:
        """How a worker may be when it has left a broken generation."""
        yield _stepped(cell)._replace(phase=LEFT) if cell.phase == REDUCED and self.finishes else cell

    def _may_step(self, world: World, worker: Worker, cell: Cell) -> bool:
        return not self.waits or self._others_reduced(world, worker, cell.count)

    def _settled(self, world: World, worker: Worker, cell: Cell) -> bool:
        return not self.settles or self._others_reduced(world, worker, cell.count - 1)

    def _others_reduced(self, world: World, worker: Worker, count: int) -> bool:
        """Has every other stage said what it has reduced? Only once all of it have."""
        elsewhere = (c for w, c in zip(self.workers, world.cells, strict=True) if w.stage != worker.stage)
        return all(c.at_least(count, REDUCED) for c in elsewhere if c.in_generation)

    def _peers(self, world: World, worker: Worker) -> list[Cell]:
        cells = (world.cells[self.index(Worker(p, worker.stage))] for p in range(self.pipelines))
        return [c for c in cells if c.in_generation]

    # -- between two generations -----------------------------------------------------------------------

    def _agreements(self, world: World, *, only_returns: bool = False) -> Iterator[World]:
        gone = [i for i, c in enumerate(world.cells) if not c.alive]
        comers: list[tuple[int, ...]] = [] if only_returns else [()]
        if world.returns < self.returns:
            comers += [(i,) for i in gone]
        for comer in comers:
            after = self._agree(world, comer)
            if after is not None:
                yield after

    def _agree(self, world: World, comers: tuple[int, ...]) -> World | None:
        workers, cells = self.workers, list(world.cells)
        members = [i for i, c in enumerate(cells) if c.alive or i in comers]
        counts = {workers[i]: None if i in comers else cells[i].count for i in members}
        incomplete = {workers[i] for i in members if i not in comers and cells[i].status == "part"}
        try:
            agreement = agree(counts, incomplete)
        except NoAgreementError as error:
            held = {workers[i].stage for i in members if i not in comers and cells[i].status == "whole"}
            if len(held) == self.stages:
                raise Violation(f"{error}: {world}") from None
            return None  # a stage is lost: a checkpoint's affair
        if agreement.iteration < world.certain:
            raise Violation(f"behind what is recorded: {agreement} of {world}")
        for i in members:
            worker, cell = workers[i], cells[i]
            if worker in agreement.anew:
                for source in (cells[self.index(holder)] for holder in agreement.state_from[worker]):
                    if source.status != "whole" or not agreement.iteration <= source.count <= agreement.iteration + 1:
                        raise Violation(f"{worker} takes state from {source} for {agreement.iteration}")
                cells[i] = Cell("part", agreement.iteration, new=True)
                continue
            if worker in agreement.roll_back:
                if not cell.undo:
                    raise Violation(f"{worker} can't roll back: {world}")
                cell = cell._replace(count=cell.count - 1, undo=False)
            if cell.count != agreement.iteration:
                raise Violation(f"{worker} is at {cell.count}, the others at {agreement.iteration}: {world}")
            cells[i] = cell._replace(phase=WORKS, left=False)
        cells = [c if i in members else Cell("out") for i, c in enumerate(cells)]
        return World(tuple(cells), False, world.deaths, world.returns + len(comers), world.certain)

    def _with(self, world: World, i: int, cell: Cell) -> World:
        cells = (*world.cells[:i], cell, *world.cells[i + 1 :])
        held = [c.count for c in cells if c.alive]
        return world._replace(cells=cells, certain=max(world.certain, min(held, default=0)))


def _stepped(cell: Cell) -> Cell:
    return cell._replace(count=cell.count + 1, phase=WORKS, undo=True)


IDLE = frozenset({Worker(1, 1)})
REPLICA = frozenset({Worker(1, 0), Worker(1, 1)})
