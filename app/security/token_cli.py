"""The command line's tokens: `openrecycle token create`, `list` and `revoke`, on the console's database."""

from __future__ import annotations

import getpass
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated

import typer

from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.security.service import AuditLog
from openrecycle.app.security.tokens import Tokens
from openrecycle.app.settings import default_database_url
from openrecycle.db.audit import AuditStore
from openrecycle.db.session import Database, DatabaseError
from openrecycle.db.store import Store
from openrecycle.db.tokens import TokenStore

tokens = typer.Typer(help="Tokens that let others view, operate, or report to a console.", no_args_is_help=True)

DatabaseUrl = Annotated[
    str,
    typer.Option(envvar="DATABASE_URL", help="The console's database, as for serve.", show_default=False),
]


@tokens.command()
def create(
    role: Annotated[str, typer.Option(help="view, operate or agent.")],
    job: Annotated[str | None, typer.Option(help="Id of the only job that an agent's token is good for.")] = None,
    name: Annotated[str, typer.Option(help="Whose it is, for the audit log.")] = "",
    days: Annotated[float | None, typer.Option(help="Days until it expires; without, it never does.")] = None,
    database_url: DatabaseUrl = "",
) -> None:
    """Prints a new token, this once: the console keeps only a hash of it."""
    with _opened(database_url) as (made, audit, jobs):
        if job is not None and job not in jobs:
            raise ConsoleError(404, "unknown_job", f"--job: got {job!r}, expected the id of a job of this console")
        token, text = made.create(role, created_by=_who(), name=name, job_id=job, days=days)
        audit.record(_who(), "create token", token.id, job_id=job, detail=token.name)
    print(text)
    ends = "it does not expire" if token.expires_at is None else f"it expires on {_day(token.expires_at)}"
    print(f"{token.name!r} may {_words(token.role, job)}; {ends}. It is not shown again.", file=sys.stderr)


@tokens.command("list")
def listed(database_url: DatabaseUrl = "") -> None:
    """Every token, newest first, without its secret."""
    with _opened(database_url) as (made, _, _):
        found = made.list()
    now = time.time()
    rows = [("ID", "ROLE", "NAME", "CREATED", "LAST USED", "STATE")]
    for token in found:
        state = "revoked" if token.revoked_at else "valid" if token.valid(now) else "expired"
        if state == "valid" and token.expires_at:
            state = f"until {_day(token.expires_at)}"
        used = _day(token.last_used_at) if token.last_used_at else "-"
        role = f"{token.role} of {token.job_id}" if token.job_id else token.role.value
        rows.append((token.id, role, token.name, _day(token.created_at), used, state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@tokens.command()
def revoke(
    token: Annotated[str, typer.Argument(help="Its id: the middle part of it, as list shows.")],
    database_url: DatabaseUrl = "",
) -> None:
    """From now on the token is good for nothing; a console that runs notices within two seconds."""
    with _opened(database_url) as (made, audit, _):
        gone = made.revoke(token)
        audit.record(_who(), "revoke token", gone.id, job_id=gone.job_id, detail=gone.name)
    print(f"{gone.name!r} ({gone.id}) is revoked", file=sys.stderr)


@contextmanager
def _opened(database_url: str) -> Iterator[tuple[Tokens, AuditLog, set[str]]]:
    """Tokens, audit log, and the ids of jobs. What is refused ends the program: a sentence, status 2."""
    try:
        database = Database(database_url or default_database_url())
        try:
            database.upgrade()
            store = Store(database)
            yield Tokens(TokenStore(database)), AuditLog(AuditStore(database)), {row["id"] for row in store.jobs()}
        finally:
            database.close()
    except (ConsoleError, DatabaseError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def _words(role: str, job: str | None) -> str:
    if role == "agent":
        return f"report on job {job} alone" if job else "create jobs and report on them"
    return "look at everything" if role == "view" else "look at everything and operate"


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _who() -> str:
    try:
        return f"{getpass.getuser()} on the command line"
    except (KeyError, OSError):
        return "the command line"
