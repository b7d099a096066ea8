"""Who leads a job of several nodes, and how long ago it was heard (agent.coordination.membership decides)."""

from __future__ import annotations

from openrecycle.agent.coordination.membership import LeadTerm, may_speak_as_lead, may_take_lead
from openrecycle.agent.messages.protocol import DEPOSED
from openrecycle.app.runtime.errors import ConsoleError


class JobLead:
    """Of one job. `newest` is stored by whoever has it changed; the rest is of this console alone.

    unheard: seconds since the newest lead was heard, that this console itself was at work: one that stood still, or has
    just started, has not waited for anybody.
    """

    def __init__(self) -> None:
        self.newest = LeadTerm()
        self.unheard = 0.0

    def read(self, term: int, node: int) -> None:
        if (stored := LeadTerm(term, node)) != self.newest:
            self.newest, self.unheard = stored, 0.0

    def heard(self, sender: LeadTerm) -> bool:
        """False: it is of a later term, which is to be stored first. Raises ConsoleError for one that leads no more."""
        speaks, reason = may_speak_as_lead(self.newest, sender)
        if not speaks:
            raise ConsoleError(409, DEPOSED, reason)
        if sender != self.newest:
            return False
        self.unheard = 0.0
        return True

    def may_take(self, wanted: LeadTerm, after: int, borne: float) -> tuple[bool, str]:
        return may_take_lead(self.newest, wanted, after, self.unheard, borne)

    def wait(self, seconds: float) -> None:
        """So long this console has been at work."""
        self.unheard += seconds
