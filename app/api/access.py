"""Routes for the caller's own role, the tokens that an administrator makes for others, and the audit log."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from openrecycle.agent.messages.protocol import Identifier
from openrecycle.app.api.models import Actor, ReadBeside
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.runtime.runner import in_thread
from openrecycle.app.security.access import MAX_DAYS, caller_of


class CallerInfo(BaseModel):
    """role: view, operate, agent or administer. job_id: the only job that the token is good for."""

    name: str
    role: str
    job_id: str | None


class TokenWanted(BaseModel):
    """name: for the audit log. job_id: of an agent's token that is good for one job. days: until it expires."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["view", "operate", "agent"]
    name: Annotated[str, Field(max_length=80)] = ""
    job_id: Identifier | None = None
    days: Annotated[float, Field(strict=True, gt=0, le=MAX_DAYS, allow_inf_nan=False)] | None = None


class TokenInfo(BaseModel):
    """A Token without what its secret is checked by. Times are POSIX seconds. last_used_at: written every half
    minute."""

    id: str
    name: str
    role: str
    job_id: str | None
    created_by: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


class TokenMade(TokenInfo):
    """token: shown here and never again."""

    token: str


class TokenList(BaseModel):
    tokens: list[TokenInfo]


class AuditLine(BaseModel):
    """at: POSIX seconds."""

    id: int
    at: float
    actor: str
    action: str
    job_id: str | None
    target: str
    detail: str


class AuditLines(BaseModel):
    audit: list[AuditLine]


def router(console: ConsoleService) -> APIRouter:
    api = APIRouter(tags=["access"], route_class=ReadBeside)
    tokens = console.security.tokens

    @api.get("/caller")
    async def caller(request: Request) -> CallerInfo:
        """Whose token this is, and what it may do."""
        found = caller_of(console.security.access, request.headers)
        return CallerInfo(name=found.name, role=found.role.value, job_id=found.job_id)

    @api.get("/tokens")
    async def listed() -> TokenList:
        """Newest first, those that are of no use any more included."""
        return TokenList(tokens=[TokenInfo(**vars(token)) for token in await in_thread(tokens.list)])

    @api.post("/tokens", status_code=201)
    async def create(wanted: TokenWanted, x_actor: Actor = "API") -> TokenMade:
        """The token is in the answer, and nowhere else: the console keeps a hash of it. So no Idempotency-Key is
        heeded: sent again, the request makes another token."""
        if wanted.job_id is not None:
            await console.jobs.find_beside(wanted.job_id)
        token, text = await in_thread(
            tokens.create,
            wanted.role,
            created_by=x_actor,
            name=wanted.name,
            job_id=wanted.job_id,
            days=wanted.days,
        )
        await in_thread(
            console.security.audit.record, x_actor, "create token", token.id, job_id=token.job_id, detail=token.name
        )
        return TokenMade(**vars(token), token=text)

    @api.delete("/tokens/{token_id}", status_code=204)
    async def revoke(token_id: Identifier, x_actor: Actor = "API") -> None:
        """At once; pages that are open with it close."""
        token = await in_thread(tokens.revoke, token_id)
        await in_thread(
            console.security.audit.record, x_actor, "revoke token", token.id, job_id=token.job_id, detail=token.name
        )

    @api.get("/audit")
    async def audit(
        after: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=5000)] = 200,
        job_id: Annotated[Identifier | None, Query()] = None,
    ) -> AuditLines:
        """Lines with an id > after, oldest first: read on with `after` = the last one's id."""
        return AuditLines(
            audit=[AuditLine(**row) for row in await in_thread(console.security.audit.read, after, limit, job_id)]
        )

    return api
