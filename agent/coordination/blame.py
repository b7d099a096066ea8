"""Decides which link is to blame when transfers break though nobody died. Pure: no processes, no clock, no torch.

A worker reports with which peer a transfer broke. One bad link makes many workers complain: some wait for a worker that
itself waits, others find a connection closed by a worker that has given up. So complaints are followed to where they
end: a complaint counts against a worker only if that worker does not itself complain of a third one.

- The link of a pair of workers may break `BORNE` times, and each time all workers form anew. When it breaks once more,
  one end is taken out: the one of which more peers have complained; of equals, the one whose stage has more holders of
  state; of equals, the one whose name comes last. The last holder of a stage's state is never taken out: then the other
  end is.
- A worker that was taken out may re-join. When a pair that it belongs to breaks again, it is taken out for good.
- All this is remembered of a place's process and its successors, which run where it ran. It goes with a process that
  moves. A worker that is made of spare ranks runs elsewhere, so it begins with nothing: its links cost more of these
  each time, since a worker that was taken out leaves none.
- The job ends when `IN_A_ROW` generations in a row break before an iteration is committed; or `UNNAMED` generations,
  where no worker could name the peer.
- A generation that some member has not taken up yet breaks because of that member, which may be slow or hang. That is
  no link's fault, and is judged elsewhere.
- A break is forgotten after `MEMORY` committed iterations; that a worker was taken out is forgotten after `PROBATION`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from openrecycle.planner.jobs.job import Worker

Pair = tuple[str, str]
"""Two workers' names, in order."""


BORNE = 2
"""Breaks of a pair before one end is taken out."""
IN_A_ROW, UNNAMED = 5, 20
"""How many generations in a row may break before the job ends: with a named pair, and without."""
MEMORY, PROBATION = 100, 1000
"""Committed iterations after which a break is forgotten, and after which it is forgotten that a worker was taken
out."""


@dataclass(frozen=True)
class Complaint:
    """`reporter` could not exchange data with `peer`; "": it can't tell with whom."""

    reporter: str
    peer: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Break:
    """One break of a link. committed: iterations by then. complaints: (reporter, peer), those that were followed to
    their end."""

    committed: int
    pair: Pair
    complaints: tuple[Pair, ...]


@dataclass(frozen=True)
class Links:
    """What is remembered of links that broke.

    in_a_row, unnamed: generations that broke since an iteration was last committed, with a named pair and without.
    committed: iterations at the last break. taken_out: for each worker that was taken out, how many iterations were
    committed then. barred: workers that are out for good.
    """

    breaks: tuple[Break, ...] = ()
    in_a_row: int = 0
    unnamed: int = 0
    committed: int = -1
    taken_out: Mapping[str, int] = field(default_factory=dict)
    barred: tuple[str, ...] = ()

    def without(self, places: Collection[str]) -> Links:
        """Returns what is remembered once none of the processes that were there, nor a successor, is there any more."""
        if not self.known.intersection(places):
            return self
        return replace(
            self,
            breaks=tuple(
                replace(b, complaints=tuple(pair for pair in b.complaints if not {*pair} & {*places}))
                for b in self.breaks
                if not {*b.pair} & {*places}
            ),
            taken_out={name: at for name, at in self.taken_out.items() if name not in places},
            barred=tuple(name for name in self.barred if name not in places),
        )

    def moved(self, came: Mapping[str, str]) -> Links:
        """Returns what is remembered after processes have moved: it goes with them. came: where each was, by the place
        that it has from now on."""
        to = {source: place for place, source in came.items()}
        links = self.without(came.keys() - to.keys())
        if not links.known.intersection(to):
            return links

        def now(name: str) -> str:
            return to.get(name, name)

        return replace(
            links,
            breaks=tuple(
                Break(b.committed, _pair(*map(now, b.pair)), tuple((now(r), now(p)) for r, p in b.complaints))
                for b in links.breaks
            ),
            taken_out={now(name): at for name, at in links.taken_out.items()},
            barred=tuple(map(now, links.barred)),
        )

    @property
    def known(self) -> frozenset[str]:
        """The workers of which something is remembered, if only that they complained, or were complained of, when
        another link broke."""
        of_breaks = (name for b in self.breaks for pair in (b.pair, *b.complaints) for name in pair)
        return frozenset((*self.taken_out, *self.barred, *of_breaks))


@dataclass(frozen=True)
class BlameDecision:
    """What follows from a break. links: what is remembered from now on. text: a sentence for people, which names the
    pair. out: the worker to take out of the job; "": none. halt: why the job can't go on; "": it can."""

    links: Links
    text: str
    out: str = ""
    halt: str = ""


def judge(
    links: Links,
    complaints: Iterable[Complaint],
    *,
    committed: int,
    holders: Collection[str],
    late: Collection[str] = (),
) -> BlameDecision:
    """Decides what follows from the complaints of one generation, in which nobody died.

    committed: iterations so far. holders: the living workers that have their stage's state. late: members that have
    not taken up the generation.
    """
    if late:
        names = ", ".join(sorted(late)[:3])
        return BlameDecision(
            links, f"the generation did not form, since {names} had not taken it up yet: the same workers form anew"
        )
    complaints = sorted(complaints, key=lambda c: (c.reporter, c.peer))
    if committed > links.committed:
        links = replace(links, in_a_row=0, unnamed=0)
    links = replace(
        links,
        committed=committed,
        breaks=tuple(b for b in links.breaks if committed - b.committed < MEMORY),
        taken_out={w: at for w, at in links.taken_out.items() if committed - at < PROBATION},
    )
    pair, ends = attribute(complaints)
    if pair is None:
        who = "; ".join(f"{c.reporter}: {c.detail or 'a transfer broke'}" for c in complaints[:3])
        links = replace(links, unnamed=links.unnamed + 1)
        if links.unnamed >= UNNAMED:
            return BlameDecision(
                links,
                who,
                halt=f"transfers broke in {links.unnamed} generations in a row though nobody died, and no iteration "
                f"was committed; nobody can say which link it is ({who})",
            )
        return BlameDecision(links, f"a transfer broke though nobody died ({who}): the same workers form anew")

    here = Break(committed, pair, ends)
    links = replace(links, breaks=(*links.breaks, here), in_a_row=links.in_a_row + 1)
    times = sum(b.pair == pair for b in links.breaks)
    text = f"the link between {pair[0]} and {pair[1]} broke though nobody died" + (
        f", for the {_nth(times)} time" if times > 1 else ""
    )
    returned = [name for name in pair if name in links.taken_out]
    able = [name for name in (returned or pair) if _holders_beside(name, holders)]
    if (times > BORNE or returned) and able:
        complainers = {name: _complainers(links, name) for name in pair}
        out = max(able, key=lambda name: (complainers[name], _holders_beside(name, holders), Worker.parse(name)))
        for_good = out in links.taken_out
        counts = ", ".join(f"{complainers[name]} of {name}" for name in pair)
        text += f": {out} is taken out (workers that complain: {counts})" + (
            ", for good: it was taken out for this before" if for_good else "; it may re-join"
        )
        links = replace(
            links,
            breaks=tuple(b for b in links.breaks if out not in b.pair),
            in_a_row=0,
            taken_out={**links.taken_out, out: committed},
            barred=(*links.barred, out) if for_good else links.barred,
        )
        return BlameDecision(links, text, out)
    if links.in_a_row >= IN_A_ROW:
        pairs = Counter(b.pair for b in links.breaks[-links.in_a_row :])
        named = ", ".join(f"{a} and {b} ({n} times)" for (a, b), n in pairs.most_common())
        return BlameDecision(
            links,
            text,
            halt=f"links broke in {links.in_a_row} generations in a row though nobody died, and no iteration was "
            f"committed: "
            f"{named}. Neither end can be spared where it is the last that holds its stage; look at their network",
        )
    return BlameDecision(links, text + ": the same workers form anew")


def attribute(complaints: Iterable[Complaint]) -> tuple[Pair | None, tuple[Pair, ...]]:
    """Returns the pair whose link broke, and all complaints that were followed to their end, those of other pairs too.
    Returns (None, ()) when no worker named a peer.

    Of several pairs, it is one of which both ends complain; of equals, the first in order.
    """
    said = {c.reporter: c.peer for c in complaints if c.peer and c.peer != c.reporter}
    ends = [(r, p) for r, p in said.items() if said.get(p, r) == r] or list(said.items())
    if not ends:
        return None, ()
    pairs = Counter(_pair(r, p) for r, p in ends)
    pair = min(pairs, key=lambda pair: (-pairs[pair], pair))
    return pair, tuple(sorted(ends))


def _pair(one: str, other: str) -> Pair:
    return (one, other) if Worker.parse(one) < Worker.parse(other) else (other, one)


def _complainers(links: Links, name: str) -> int:
    """Returns how many peers have complained of this worker."""
    return len({reporter for b in links.breaks for reporter, peer in b.complaints if peer == name})


def _holders_beside(name: str, holders: Collection[str]) -> int:
    stage = Worker.parse(name).stage
    return sum(Worker.parse(other).stage == stage for other in holders if other != name)


def _nth(times: int) -> str:
    return {2: "second", 3: "third"}.get(times, f"{times}th")
