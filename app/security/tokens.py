"""Tokens that an administrator makes for others: `orc_<id>_<secret>`.

They are checked in memory: a heartbeat must not wait for the database. Another process may make or
revoke some in the same database, so they are read again every few seconds, and an id that is not known
is looked up.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.app.runtime.errors import ConsoleError, storing
from openrecycle.app.security.callers import Caller, Role
from openrecycle.db.store import Record
from openrecycle.db.tokens import TokenStore

log = structlog.get_logger()

PREFIX = "orc_"
FORM = re.compile(r"orc_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
GRANTED = (Role.VIEW, Role.OPERATE, Role.AGENT)
MAX_DAYS = 3650
# Seconds: a token that was revoked elsewhere is good for so long at most.
REFRESH = 2.0
# Seconds between two writes of when tokens were used.
USES = 30.0
# Seconds that the token of a job outlives it, for its last reports.
AFTER_JOB = 3600.0

_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,80}")


@dataclass(frozen=True)
class Token:
    """As db.models.TokenRow has it."""

    id: str
    secret_hash: str = field(repr=False)
    name: str
    role: Role
    job_id: str | None
    created_by: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None

    def valid(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    @property
    def caller(self) -> Caller:
        until = math.inf if self.expires_at is None else self.expires_at
        return Caller(f"token:{self.id}", self.name, self.role, self.job_id, until)


class Tokens:
    """Thread-safe. clock: POSIX seconds."""

    def __init__(self, store: TokenStore, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._known: dict[str, Token] = {}
        self._used: dict[str, float] = {}
        self._written = clock()
        self._lock = threading.RLock()  # of changes to what is known; `check` needs none
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # -- life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Reads them, and keeps reading. Only a console with a token of its own needs that."""
        self.refresh()
        self._thread = threading.Thread(target=self._keep_up, name="tokens", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2)
            self.refresh(write=True)

    def _keep_up(self) -> None:
        while not self._stop.wait(REFRESH):
            self.refresh(write=self._clock() - self._written >= USES)

    def refresh(self, *, write: bool = False) -> None:
        """Reads all that are valid; what is known stays where the database does not answer."""
        try:
            if write:
                used, self._used = self._used, {}
                self._written = self._clock()
                if used:
                    self._store.used(used)
            with self._lock:
                self._known = {row["id"]: _token(row) for row in self._store.all(valid_at=self._clock())}
        except SQLAlchemyError as error:
            log.warning("tokens could not be read again", reason=type(error).__name__)

    # -- checking ---------------------------------------------------------------------------

    def check(self, given: str) -> Token | None:
        """The token, if it is known here, right and valid. Touches no database."""
        found = FORM.fullmatch(given)
        token = self._known.get(found[1]) if found else None
        # A wrong id takes as long as a wrong secret.
        right = hmac.compare_digest(token.secret_hash if token else _hash(""), _hash(found[2] if found else given))
        now = self._clock()
        if token is None or not right or not token.valid(now):
            return None
        self._used[token.id] = now
        return token

    def is_known(self, given: str) -> bool:
        """Is there a token of this id, with whatever secret?"""
        found = FORM.fullmatch(given)
        return found is not None and found[1] in self._known

    def has_ended(self, given: str) -> bool:
        """Was it right, until it was revoked or expired? Then nobody guesses."""
        found = FORM.fullmatch(given)
        token = self._known.get(found[1]) if found else None
        if found is None or token is None:
            return False
        return hmac.compare_digest(token.secret_hash, _hash(found[2])) and not token.valid(self._clock())

    def look_up(self, given: str) -> Token | None:
        """As `check`, after a look into the database for an id that is not known here. Raises ConsoleError (503)."""
        found = FORM.fullmatch(given)
        if found is not None and found[1] not in self._known:
            with self._lock, storing():
                row = self._store.get(found[1])
                if row is not None:
                    self._known = {**self._known, row["id"]: _token(row)}
        return self.check(given)

    def by_id(self, token_id: str) -> Token | None:
        """A known, valid one."""
        token = self._known.get(token_id)
        return token if token is not None and token.valid(self._clock()) else None

    def note(self, token_id: str) -> None:
        """That it was used now."""
        self._used[token_id] = self._clock()

    # -- making -----------------------------------------------------------------------------

    def create(
        self, role: str, *, created_by: str, name: str = "", job_id: str | None = None, days: float | None = None
    ) -> tuple[Token, str]:
        """The token and its text, which nobody will know again. Raises ConsoleError (422, 503)."""
        if role not in GRANTED:
            raise ConsoleError(422, "invalid", f"role: got {role!r}, expected view, operate or agent")
        if job_id is not None and role != Role.AGENT:
            raise ConsoleError(422, "invalid", f"job: got {job_id!r}, expected none with role {role}: only agents' may")
        if days is not None and not 0 < days <= MAX_DAYS:
            raise ConsoleError(422, "invalid", f"days: got {days:g}, expected more than 0, at most {MAX_DAYS}")
        name = name.strip() or (f"agents of job {job_id}" if job_id else f"{role} token")
        if not _NAME.fullmatch(name):
            raise ConsoleError(422, "invalid", f"name: got {name[:100]!r}, expected 1 to 80 printable characters")
        token_id, secret, now = secrets.token_hex(6), secrets.token_urlsafe(32), self._clock()
        token = Token(
            id=token_id,
            secret_hash=_hash(secret),
            name=name,
            role=Role(role),
            job_id=job_id,
            created_by=created_by,
            created_at=now,
            expires_at=None if days is None else now + days * 86_400,
            revoked_at=None,
            last_used_at=None,
        )
        with self._lock, storing():
            self._store.add({**token.__dict__, "role": token.role.value})
            self._known = {**self._known, token_id: token}
        return token, f"{PREFIX}{token_id}_{secret}"

    def list(self) -> list[Token]:
        """All that ever were, newest first. Raises ConsoleError (503)."""
        with storing():
            return [_token(row) for row in self._store.all()]

    def revoke(self, token_id: str) -> Token:
        """From now on it is good for nothing. Raises ConsoleError (404, 409, 503)."""
        with self._lock, storing():
            row = self._store.get(token_id)
            if row is None:
                raise ConsoleError(404, "unknown_token", f"token: got {token_id!r}, expected the id of a token")
            if not self._store.revoke(token_id, self._clock()):
                raise ConsoleError(409, "revoked", f"token {token_id} was revoked before")
            self._known = {known: token for known, token in self._known.items() if known != token_id}
        return _token(row)

    def end_job(self, job_id: str) -> None:
        """The job is over; its agents' tokens soon are, too."""
        try:
            self._store.end_job(job_id, self._clock() + AFTER_JOB)
        except SQLAlchemyError as error:
            log.warning("the tokens of a job could not be ended", job=job_id, reason=type(error).__name__)


def _hash(secret: str) -> str:
    """Plain SHA-256: the secret has 256 random bits, so that there is nothing to guess that a slow, salted
    hash would protect, and a heartbeat can't wait for one."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _token(row: Record) -> Token:
    return Token(**{**row, "role": Role(row["role"])})
