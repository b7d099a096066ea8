"""Who leads a job of several nodes, as its console has it: the newest term, whose it is, and who may have the next.

The nodes elect their lead themselves (agent.nodes.succession). Where those that hear each other are too few for that,
as with two nodes, the console decides. It takes nothing from a launcher of an earlier term: so whoever has lost the
lead, and does not know it, does no harm. No I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LeadTerm:
    """A leadership: its number, and the node that leads in it. 0: nobody has led yet."""

    term: int = 0
    node: int = 0

    def __str__(self) -> str:
        """As a launcher says it with whatever it asks of a console."""
        return f"{self.term}/{self.node}"

    @classmethod
    def parse(cls, text: str) -> LeadTerm:
        """Raises ValueError for what is none."""
        term, slash, node = text.partition("/")
        if not (slash and text.isascii() and term.isdigit() and node.isdigit() and len(text) <= 20):
            raise ValueError(f"got {text[:40]!r}, expected TERM/NODE such as 2/1")
        return cls(int(term), int(node))


def may_speak(newest: LeadTerm, sender: LeadTerm) -> tuple[bool, str]:
    """Is what a launcher says to be taken? One of a later term was elected by the nodes, and leads from then on."""
    if sender == newest or sender.term > newest.term:
        return True, f"node {sender.node} leads in term {sender.term}"
    return False, f"node {newest.node} leads the job in term {newest.term}: node {sender.node} leads it no more"


def may_take(newest: LeadTerm, wanted: LeadTerm, after: int, unheard: float, borne: float) -> tuple[bool, str]:
    """May a node have the lead that too few follow? after: the newest term that it knows of. unheard: seconds since the
    newest lead was heard; borne: of them it keeps the lead so many."""
    if wanted == newest:
        return True, f"node {wanted.node} has the lead already"  # the answer was lost
    if newest.term >= wanted.term or (newest.term > after and newest.node != wanted.node):
        return False, f"node {newest.node} leads in term {newest.term}"
    if newest.term > after:
        return True, f"node {wanted.node} was given the lead in term {newest.term}, and does not know it"
    if unheard < borne:
        return False, f"node {newest.node}, which leads, was heard {unheard:.1f} s ago"
    return True, f"node {newest.node}, which led, was not heard for {unheard:.1f} s"
