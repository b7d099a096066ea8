"""Who asks, and what each role may ask for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from openrecycle.agent.messages.protocol import API

# Set by the guard on every request that it lets through, and never taken from outside.
CALLER = "x-openrecycle-caller"
ACTOR = "x-actor"  # of any alphabet: see `actor_of`
# In the scope, from the guard: may whoever asked still ask? For answers that take long.
STILL = "openrecycle.still"
MAX_ACTOR = 80


class Role(StrEnum):
    """VIEW reads. OPERATE does all that an operator does, and creates jobs. AGENT reports on jobs, or on
    one job alone. ADMINISTER makes tokens, too: the token that the console was started with."""

    VIEW = "view"
    OPERATE = "operate"
    AGENT = "agent"
    ADMINISTER = "administer"


_READERS = frozenset({Role.VIEW, Role.OPERATE, Role.ADMINISTER})
_OPERATORS = frozenset({Role.OPERATE, Role.ADMINISTER})
_REPORTERS = _OPERATORS | {Role.AGENT}


@dataclass(frozen=True)
class Caller:
    """key: what limits and sessions go by. name: for the audit log. job_id: of an agent's token that is
    good for one job. until: POSIX seconds at which the session ends."""

    key: str
    name: str
    role: Role
    job_id: str | None = None
    until: float = math.inf

    @property
    def operates(self) -> bool:
        return self.role in _OPERATORS

    @property
    def reports(self) -> bool:
        return self.role in _REPORTERS

    @lru_cache(maxsize=4096)  # noqa: B019 (callers are few and small; agents send the same one each second)
    def to_header(self) -> bytes:
        """ASCII, so that a name of any alphabet passes."""
        until = None if math.isinf(self.until) else self.until
        return json.dumps([self.key, self.name, self.role.value, self.job_id, until]).encode("ascii")


def from_header(text: str) -> Caller:
    """What the guard wrote. Raises ValueError for anything else."""
    key, name, role, job_id, until = json.loads(text)
    return Caller(key, name, Role(role), job_id, math.inf if until is None else until)


def actor_of(text: str) -> str:
    """What the guard wrote in ACTOR, in UTF-8. text: as Starlette reads headers, in latin-1."""
    return text.encode("latin-1", "replace").decode("utf-8", "replace")


# Anybody on this machine, where the console has no token. The API says who it was by X-Actor.
LOCAL = Caller("local", "operator in the browser", Role.ADMINISTER)

# What agents and launchers ask for, below /api/v1; the first group is the job.
_AGENT_ROUTES: Mapping[str, tuple[re.Pattern[str], ...]] = {
    "POST": (
        re.compile(r"/jobs"),
        re.compile(
            r"/jobs/([^/]+)/(?:workers|heartbeats|acknowledgements|failures|iterations|recoveries|relayouts|finish|logs"
            r"|validations|measured|interim|lead)"
        ),
    ),
    "GET": (
        re.compile(r"/clock"),
        re.compile(r"/jobs/([^/]+)"),  # a launcher says why its job stands still
        re.compile(r"/jobs/([^/]+)/(?:deployment|commands)"),
        re.compile(r"/jobs/([^/]+)/plans/[^/]+"),
    ),
}
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


def agent_route(method: str, path: str) -> tuple[bool, str | None]:
    """Is it one of theirs, and which job does it speak of?"""
    if path.startswith(API):
        below = path[len(API) :]
        for pattern in _AGENT_ROUTES.get(method, ()):
            if found := pattern.fullmatch(below):
                return True, found[1] if pattern.groups else None
    return False, None


def refusal(caller: Caller, method: str, path: str) -> str:
    """Why `caller` may not ask for this; "" when it may. Pages and WebSockets are GET."""
    wanted: frozenset[Role]
    agents, job_id = agent_route(method, path)
    if path == f"{API}/tokens" or path.startswith(f"{API}/tokens/"):
        wanted = frozenset({Role.ADMINISTER})
    elif path == f"{API}/audit":
        wanted = _OPERATORS
    elif path == f"{API}/caller":
        return ""
    elif agents:
        wanted = _REPORTERS | (_READERS if method == "GET" else frozenset())
    else:
        # What is not known here changes something, until somebody says otherwise.
        wanted = _READERS if method in _READS else _OPERATORS
    if caller.role not in wanted:
        return f"role: got {caller.role}, expected {_words(wanted)} for {method} {path}"
    if caller.job_id is not None and caller.job_id != job_id and path != f"{API}/clock":
        return f"token: it is good for job {caller.job_id} alone"
    return ""


def _words(roles: frozenset[Role]) -> str:
    named = [role.value for role in Role if role in roles and role is not Role.ADMINISTER]
    return " or ".join(named) or "the token that the console was started with"
