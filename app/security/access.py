"""Access to the console: roles, sign-in, tokens, rate limits, and the audit log.

People sign in with a token, after which a signed cookie stands for it, or with an account of an OpenID Connect
provider. Streamlit's own login does that protocol, and keeps the account in a signed cookie; this file says which role
an account has.

Tokens that an administrator makes for others (`orc_<id>_<secret>`) are checked in memory, since a heartbeat must not
wait for the database. Another process may make or revoke tokens in the same database, so they are read again every few
seconds, and an unknown id is looked up.

Rate limits are per token or account, and per address for requests without a valid one.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import json
import math
import re
import secrets
import threading
import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import structlog
from cachetools import LRUCache
from itsdangerous import BadSignature, Signer
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, Response

from openrecycle.agent.messages.protocol import API
from openrecycle.app.runtime.errors import ConsoleError, SettingsError, named, storing, unavailable
from openrecycle.app.runtime.processes import Seldom
from openrecycle.app.runtime.runner import in_thread
from openrecycle.app.runtime.settings import OidcSettings, read_secret
from openrecycle.db.access import AuditStore, TokenStore, audit_row
from openrecycle.db.session import Database
from openrecycle.db.store import Record

# -- who asks, and what each role may ask for ---------------------------------------------------

# Headers that the guard sets on every request that it lets through; CALLER is never taken from outside.
CALLER = "x-openrecycle-caller"
ACTOR = "x-actor"  # may have any alphabet: see `actor_of`
MAX_ACTOR = 80


class Role(StrEnum):
    """What a caller may do. VIEW reads. OPERATE also does all that an operator does, and creates jobs. AGENT reports on
    all jobs, or on one. ADMINISTER does everything, and makes tokens; the token that the console was started with has
    this role."""

    VIEW = "view"
    OPERATE = "operate"
    AGENT = "agent"
    ADMINISTER = "administer"


_READERS = frozenset({Role.VIEW, Role.OPERATE, Role.ADMINISTER})
_OPERATORS = frozenset({Role.OPERATE, Role.ADMINISTER})
_REPORTERS = _OPERATORS | {Role.AGENT}


@dataclass(frozen=True)
class Caller:
    """Who sent a request. key: identifies the caller for rate limits and sessions. name: for the audit log. job_id: the
    only job that an agent's token is good for, if there is one. until: POSIX seconds at which the session ends."""

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

    def to_header(self) -> bytes:
        """Encodes the caller for the CALLER header, in ASCII, so that names may have any alphabet."""
        until = None if math.isinf(self.until) else self.until
        return json.dumps([self.key, self.name, self.role.value, self.job_id, until]).encode("ascii")


def from_header(text: str) -> Caller:
    """Decodes the CALLER header that the guard wrote. Raises ValueError for anything else."""
    key, name, role, job_id, until = json.loads(text)
    return Caller(key, name, Role(role), job_id, math.inf if until is None else until)


def actor_of(text: str) -> str:
    """Decodes the ACTOR header, which the guard wrote in UTF-8. text: as Starlette reads headers, in latin-1."""
    return text.encode("latin-1", "replace").decode("utf-8", "replace")


# The caller of every request to a console without a token. X-Actor may give the API a name.
LOCAL = Caller("local", "operator in the browser", Role.ADMINISTER)

# The routes of agents and launchers below /api/v1; the first group is the job.
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
    """Says whether a request is for a route of agents, and for which job."""
    if path.startswith(API):
        below = path[len(API) :]
        for pattern in _AGENT_ROUTES.get(method, ()):
            if found := pattern.fullmatch(below):
                return True, found[1] if pattern.groups else None
    return False, None


def refusal(caller: Caller, method: str, path: str) -> str:
    """Says why `caller` may not make a request; "": it may. Pages and WebSockets are GET."""
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
        # A method that is not known to only read counts as a change.
        wanted = _READERS if method in _READS else _OPERATORS
    if caller.role not in wanted:
        return f"role: got {caller.role}, expected {_words(wanted)} for {method} {path}"
    if caller.job_id is not None and caller.job_id != job_id and path != f"{API}/clock":
        return f"token: it is good for job {caller.job_id} alone"
    return ""


def _words(roles: frozenset[Role]) -> str:
    named = [role.value for role in Role if role in roles and role is not Role.ADMINISTER]
    return " or ".join(named) or "the token that the console was started with"


# -- how people sign in -------------------------------------------------------------------------

COOKIE = "openrecycle_session"
# Sessions, by token or account, last this long: whoever leaves the company is out by the end of the day.
SESSION_SECONDS = 12 * 3600


def local(path: str) -> str:
    """Returns `path` if it is a path of this server, else "/": a redirect never leads to another site."""
    is_local = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_local else "/"


def login_page(
    back: str, message: str, status: int, providers: Sequence[str] = (), *, of_account: bool = False
) -> Response:
    """Makes the sign-in page. back: the path to go to afterwards. providers: whose accounts are accepted; "" for one
    without a name.

    of_account: the message is about the account, and not about the token that was given.
    """
    note = f'<p role="alert" id="why">{html.escape(message)}</p>' if message else ""
    described = ' aria-invalid="true" aria-describedby="why"' if message and not of_account else ""
    action = html.escape(f"/login?next={quote(back, safe='')}")
    accounts = "".join(
        f'<a class="account" href="/login/oidc?provider={quote(name, safe="")}">Sign in with '
        f"{html.escape(name.capitalize()) if name else 'your account'}</a>"
        for name in providers
    )
    page = _LOGIN.replace("{{action}}", action).replace("{{described}}", described)
    page = page.replace("{{accounts}}", (note if of_account else "") + accounts)
    page = page.replace("{{note}}", "" if of_account else note)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"
    return HTMLResponse(page, status, {"Content-Security-Policy": policy, "Cache-Control": "no-store"})


_LOGIN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>OpenReCycle: sign in</title><link rel="icon" href="data:,"><style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { display: grid; place-items: center; min-height: 100vh; margin: 0 }
main { width: min(22rem, calc(100vw - 3rem)) }
h1 { font-size: 1.4rem; margin: 0 0 .25rem }
label { display: block; margin: 1rem 0 .25rem }
input, button, .account { box-sizing: border-box; display: block; width: 100%; padding: .6rem; font: inherit;
  border-radius: .4rem; border: 1px solid #8a949e }
button { margin-top: .75rem; background: #2862B2; border-color: #2862B2; color: #fff; cursor: pointer }
.account { margin-top: 1rem; color: inherit; text-align: center; text-decoration: none }
input[aria-invalid] { border-color: #D7541F }
[role=alert] { color: light-dark(#A93D10, #F58A68); margin: .35rem 0 0 }
.where { margin: 1rem 0 0; font-size: .9rem; opacity: .8 }
code { white-space: nowrap }
</style></head><body><main><h1>OpenReCycle</h1>
<div>This console asks who you are.</div>{{accounts}}
<form method="post" action="{{action}}"><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus{{described}}>
{{note}}<button>Sign in</button></form>
<p class="where">Whoever runs the console has the token it was started with, and makes others with
<code>openrecycle token create</code>.</p></main></body></html>
"""


CALLBACK = "/oauth2callback"
LOGIN_STREAMLIT = "/auth/login"
SIGN_OUT = "/logout"
LOGOUT = "/auth/logout"
GROUP = "group:"
MIN_SECRET = 32
_SHARED = ("redirect_uri", "cookie_secret")
_OF_PROVIDER = ("client_id", "client_secret", "server_metadata_url")


def role_of(oidc: OidcSettings, claims: Mapping[str, Any]) -> Role | None:
    """Returns the role of an account; None: it has none. claims: of an ID token that was checked."""
    for patterns, role in ((oidc.operators, Role.OPERATE), (oidc.viewers, Role.VIEW)):
        if any(_fits(pattern, claims) for pattern in patterns):
            return role
    return None


def signed_in(oidc: OidcSettings, claims: Mapping[str, Any]) -> Caller | None:
    """Returns the caller for an account; None: it has no role, or signed in too long ago. claims: of an ID token that
    was checked."""
    role, at = role_of(oidc, claims), claims.get("iat")
    if role is None or not isinstance(at, int | float) or time.time() >= at + SESSION_SECONDS:
        return None
    name = account(claims)
    return Caller(f"oidc:{name}", name, role, until=at + SESSION_SECONDS)


class Login(Protocol):
    """The part of sign-in by account that Streamlit does."""

    def claims(self, cookies: Mapping[str, str]) -> Mapping[str, Any]:
        """Returns the claims of the account that these cookies are signed in with; {} for none."""

    def start(self, provider: str) -> str:
        """Returns the path at which sign-in with this provider begins; it is valid for minutes."""


def account(claims: Mapping[str, Any]) -> str:
    return str(claims.get("email") or claims.get("sub") or "unknown")[:80]


def _fits(pattern: str, claims: Mapping[str, Any]) -> bool:
    if pattern.startswith(GROUP):
        groups = claims.get("groups")
        return isinstance(groups, list) and pattern.removeprefix(GROUP) in groups
    email = claims.get("email")
    # An address that the provider has not verified is only what somebody typed.
    verified = claims.get("email_verified", True) in (True, "true")
    return isinstance(email, str) and verified and fnmatchcase(email.casefold(), pattern.casefold())


def read_oidc(file: Path, operators: Sequence[str], viewers: Sequence[str]) -> OidcSettings:
    """Reads and checks the settings for sign-in by account. Raises SettingsError, which names the field and never a
    secret."""
    for option, patterns in (("--oidc-operators", operators), ("--oidc-viewers", viewers)):
        for pattern in patterns:
            if "@" not in pattern and not (pattern.startswith(GROUP) and len(pattern) > len(GROUP)):
                raise SettingsError(f"{option}: got {pattern!r}, expected ada@example.org, *@example.org or group:NAME")
    if not operators and not viewers:
        raise SettingsError("--oidc: nobody could sign in; expected --oidc-operators, --oidc-viewers or both beside it")
    try:
        auth = tomllib.loads(read_secret(file, "--oidc")).get("auth")
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"--oidc {file} is not TOML: {error}") from None
    if not isinstance(auth, dict):
        raise SettingsError(f"--oidc {file}: [auth] is missing, expected a section")
    named = {name: section for name, section in auth.items() if isinstance(section, dict)}
    for name, section in named.items() or (("", auth),):
        _check(file, f"auth.{name}" if name else "auth", section, _OF_PROVIDER)
        url = section["server_metadata_url"]
        if urlsplit(url).scheme not in ("http", "https"):
            raise SettingsError(f"--oidc {file}: server_metadata_url: got {url!r}, expected an http(s) address")
        if "_" in name or not name.isprintable():
            raise SettingsError(f"--oidc {file}: [auth.{name}]: a provider's name has no underscore")
    _check(file, "auth", auth, _SHARED)
    if len(auth["cookie_secret"]) < MIN_SECRET:
        raise SettingsError(f"--oidc {file}: cookie_secret is too short, expected at least {MIN_SECRET} characters")
    redirect = auth["redirect_uri"]
    parts = urlsplit(redirect)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path != CALLBACK:
        raise SettingsError(
            f"--oidc {file}: redirect_uri: got {redirect!r}, expected this console's own address with {CALLBACK}"
        )
    return OidcSettings(file, tuple(named) or ("",), redirect, tuple(operators), tuple(viewers))


def _check(file: Path, where: str, section: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        value = section.get(name)
        if not isinstance(value, str) or not value:
            raise SettingsError(f"--oidc {file}: [{where}] {name}: missing, expected text")


# -- who somebody is, how often they may ask, and what they did ---------------------------------

log = structlog.get_logger()

PREFIX = "orc_"
FORM = re.compile(r"orc_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
GRANTED = (Role.VIEW, Role.OPERATE, Role.AGENT)
MAX_DAYS = 3650
# Seconds between two readings: a token that another process revokes is valid for this long at most.
REFRESH = 2.0
# Seconds between two writes of when tokens were used.
USES = 30.0
# Seconds for which a job's token stays valid after the job has ended, for its last reports.
AFTER_JOB = 3600.0

_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,80}")


@dataclass(frozen=True)
class Token:
    """A token without its secret; the fields are those of db.models.TokenRow."""

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
    """The tokens that administrators have made. Thread-safe. clock: POSIX seconds.

    Valid ones are kept in memory (`_known`), which a thread reads again every few seconds after `start`.
    """

    def __init__(self, store: TokenStore, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._known: dict[str, Token] = {}
        self._used: dict[str, float] = {}
        self._written = clock()
        self._seldom = Seldom()
        self._lock = threading.RLock()  # for replacing `_known`; `check` needs none
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # -- life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Reads the tokens, now and every few seconds. Only a console with a token of its own needs that."""
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
        """Reads all valid tokens; if the database does not answer, those in memory stay. write: also stores when tokens
        were used."""
        try:
            if write:
                used, self._used = self._used, {}
                self._written = self._clock()
                if used:
                    try:
                        self._store.used(used)
                    except SQLAlchemyError:  # stored with those that come until the next time
                        self._used = used | self._used
                        raise
            with self._lock:
                self._known = {row["id"]: _token(row) for row in self._store.all(valid_at=self._clock())}
        except SQLAlchemyError as error:
            self._seldom.warn("tokens could not be read again", reason=str(unavailable(error)))

    # -- checking ---------------------------------------------------------------------------

    def check(self, given: str) -> Token | None:
        """Returns the token if it is known here, has the right secret and is valid. Touches no database."""
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
        """Says whether a token with this id is known, whatever its secret."""
        found = FORM.fullmatch(given)
        return found is not None and found[1] in self._known

    def has_ended(self, given: str) -> bool:
        """Says whether the token was right until it was revoked or expired, so that nobody is guessing tokens."""
        found = FORM.fullmatch(given)
        token = self._known.get(found[1]) if found else None
        if found is None or token is None:
            return False
        return hmac.compare_digest(token.secret_hash, _hash(found[2])) and not token.valid(self._clock())

    def look_up(self, given: str) -> Token | None:
        """Does the same as `check`, but looks an unknown id up in the database first. Raises ConsoleError (503)."""
        found = FORM.fullmatch(given)
        if found is not None and found[1] not in self._known:
            with self._lock, storing():
                row = self._store.get(found[1])
                if row is not None:
                    self._known = {**self._known, row["id"]: _token(row)}
        return self.check(given)

    def by_id(self, token_id: str) -> Token | None:
        """Returns the token with this id if it is known and valid."""
        token = self._known.get(token_id)
        return token if token is not None and token.valid(self._clock()) else None

    # -- making -----------------------------------------------------------------------------

    def create(
        self, role: str, *, created_by: str, name: str = "", job_id: str | None = None, days: float | None = None
    ) -> tuple[Token, str]:
        """Makes a token. Returns it with its text, which is stored nowhere. Raises ConsoleError (422, 503)."""
        if role not in GRANTED:
            raise ConsoleError(422, "invalid", f"got {role!r}, expected view, operate or agent", field="role")
        if job_id is not None and role != Role.AGENT:
            raise ConsoleError(
                422, "invalid", f"got {job_id!r}, expected none with role {role}: only agents' may", field="job"
            )
        if days is not None and not 0 < days <= MAX_DAYS:
            raise ConsoleError(422, "invalid", f"got {days:g}, expected more than 0, at most {MAX_DAYS}", field="days")
        name = name.strip() or (f"agents of job {job_id}" if job_id else f"{role} token")
        if not _NAME.fullmatch(name):
            raise ConsoleError(
                422, "invalid", f"got {name[:100]!r}, expected 1 to 80 printable characters", field="name"
            )
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
        """Returns all tokens that were ever made, newest first. Raises ConsoleError (503)."""
        with storing():
            return [_token(row) for row in self._store.all()]

    def revoke(self, token_id: str) -> Token:
        """Makes a token invalid from now on, and returns it. Raises ConsoleError (404, 409, 503)."""
        with self._lock, storing():
            row = self._store.get(token_id)
            if row is None:
                raise ConsoleError(
                    404, "unknown_token", f"got {token_id!r}, expected the id of a token in the list", field="token"
                )
            if not self._store.revoke(token_id, self._clock()):
                raise ConsoleError(409, "revoked", f"token {token_id} was revoked before")
            self._known = {known: token for known, token in self._known.items() if known != token_id}
        return _token(row)

    def end_job(self, job_id: str) -> None:
        """Has the tokens of an ended job's agents expire soon."""
        try:
            self._store.end_job(job_id, self._clock() + AFTER_JOB)
        except SQLAlchemyError as error:
            log.warning("the tokens of a job could not be ended", job=job_id, reason=str(unavailable(error)))


def _hash(secret: str) -> str:
    """Returns a plain SHA-256. A slow, salted hash would protect secrets that can be guessed; this one has 256 random
    bits, and a heartbeat can't wait for a slow hash."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _token(row: Record) -> Token:
    return Token(**{**row, "role": Role(row["role"])})


@dataclass(frozen=True)
class RateLimit:
    """A limit of requests. per_second: in the long run. burst: at once."""

    per_second: float
    burst: float


# 2,048 launchers, which have 16,384 workers, or as many workers with a Reporter stay below this, with one batch of
# heartbeats a second and all that they ask and report when a generation opens.
AGENTS = RateLimit(5_000, 20_000)
# For people and their programs; a page is some 100 files.
PEOPLE = RateLimit(100, 1_000)
UNKNOWN = RateLimit(10, 200)

WRONG_SECONDS = 60.0
WRONG_PER_ADDRESS = 20
# The limit for an address from which a right token came before: others behind it must not lock its owner out.
WRONG_PER_GOOD_ADDRESS = 200
WRONG_IN_ALL = 200

# How many buckets are kept. The one that was idle for longest is dropped first; it is full again by then.
MAX_KEPT = 20_000

Clock = Callable[[], float]


class RateLimits:
    """Token buckets, one for each (limit, key). Has no lock: only the event loop may use it."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._buckets: LRUCache[tuple[RateLimit, str], tuple[float, float]] = LRUCache(MAX_KEPT)

    def take(self, rate: RateLimit, key: str) -> int:
        """Counts a request. Returns 0 if it may pass, else the seconds until it may."""
        now = self._clock()
        name = (rate, key)
        left, at = self._buckets.get(name, (rate.burst, now))
        left = min(rate.burst, left + (now - at) * rate.per_second)
        wait = 0 if left >= 1 else max(1, math.ceil((1 - left) / rate.per_second))
        self._buckets[name] = (left if wait else left - 1, now)
        return wait


class WrongTokens:
    """Counts the wrong tokens of the last minute, from each address and in all."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._all: deque[float] = deque(maxlen=WRONG_IN_ALL)
        self._by_address: LRUCache[str, deque[float]] = LRUCache(MAX_KEPT)
        self._good: LRUCache[str, None] = LRUCache(MAX_KEPT)

    def note(self, address: str) -> None:
        now = self._clock()
        self._all.append(now)
        self._by_address.setdefault(address, deque(maxlen=WRONG_PER_GOOD_ADDRESS)).append(now)

    def right(self, address: str) -> None:
        """Notes that a right token came from an address, so that strangers who guess can't easily lock it out."""
        self._good[address] = None

    def wait(self, address: str) -> int:
        """Returns the seconds until another token may be tried from an address; 0: now."""
        if address in self._good:
            counts = [(self._by_address.get(address), WRONG_PER_GOOD_ADDRESS)]
        else:
            counts = [(self._by_address.get(address), WRONG_PER_ADDRESS), (self._all, WRONG_IN_ALL)]
        now = self._clock()
        waits = [WRONG_SECONDS - (now - times[-most]) for times, most in counts if times and len(times) >= most]
        return max([0, *(math.ceil(wait) for wait in waits)])


CONSOLE = "console"


class Access:
    """Finds out who sent a request. token: the one that the console was started with; None: everybody may do
    everything. oidc, login: if people may sign in with an account."""

    def __init__(
        self,
        token: str | None = None,
        tokens: Tokens | None = None,
        oidc: OidcSettings | None = None,
        login: Login | None = None,
    ) -> None:
        self.guarded = token is not None
        self.tokens = tokens
        self.oidc = oidc if login is not None else None
        self.login = login
        self.wrong = WrongTokens()
        self._token = _digest(token or "")
        # Signs the cookies. A cookie reveals nothing of the token, and a new token ends all sessions.
        self._sessions = Signer(token or "", "openrecycle sessions", digest_method=hashlib.sha256)

    # -- on a request -----------------------------------------------------------------------

    async def by_token(self, given: str, address: str) -> Caller | None:
        """Returns the caller with this token; None: it is wrong. Raises ConsoleError: 429 after too many wrong ones,
        503.
        """
        token = self.tokens.check(given) if self.tokens else None
        if token is not None:
            self.wrong.right(address)
            return token.caller
        if wait := self.wrong.wait(address):
            raise ConsoleError(429, "too_many", f"too many wrong tokens came from {address}; try again in {wait} s")
        if hmac.compare_digest(_digest(given), self._token):
            self.wrong.right(address)
            return Caller(CONSOLE, "administrator", Role.ADMINISTER)
        if self.tokens is not None and not self.tokens.is_known(given):
            token = await in_thread(self.tokens.look_up, given)
        if token is not None:
            return token.caller
        if self.tokens is None or not self.tokens.has_ended(given):
            self.wrong.note(address)
        return None

    def by_cookies(self, headers: Headers) -> Caller | None:
        cookies = _cookies(headers)
        caller = self._by_session(cookies.get(COOKIE, ""))
        if caller is None and self.oidc is not None and (claims := self.claims(cookies)):
            caller = signed_in(self.oidc, claims)
        return caller

    def claims(self, cookies: Mapping[str, str]) -> Mapping[str, Any]:
        """Returns the claims of the account that these cookies are signed in with, whether it has a role or not."""
        return self.login.claims(cookies) if self.login is not None else {}

    def stranger(self, headers: Headers) -> Mapping[str, Any]:
        """Returns the claims of a signed-in account if it has no role; else {}."""
        claims = self.claims(_cookies(headers)) if self.oidc is not None else {}
        return claims if claims and self.oidc is not None and role_of(self.oidc, claims) is None else {}

    # -- sessions ---------------------------------------------------------------------------

    def session(self, caller: Caller) -> str:
        """Returns the value of a session's cookie: its end and the caller's key, signed with the console's token."""
        ends = min(caller.until, time.time() + SESSION_SECONDS)
        return self._sessions.sign(f"{int(ends)}.{caller.key}").decode()

    def _by_session(self, value: str) -> Caller | None:
        try:
            ends, _, key = self._sessions.unsign(value).decode().partition(".")
        except BadSignature:
            return None
        if not self.guarded or time.time() >= int(ends):
            return None
        if key == CONSOLE:
            return Caller(CONSOLE, "administrator", Role.ADMINISTER, until=float(ends))
        token = self.tokens.by_id(key.removeprefix("token:")) if self.tokens is not None else None
        if token is None:
            return None
        return Caller(key, token.name, token.role, token.job_id, min(float(ends), token.caller.until))

    def still(self, caller: Caller) -> bool:
        """Says whether a caller may still ask: the session has not ended, and the token was not revoked."""
        if time.time() >= caller.until:
            return False
        if caller.key.startswith("token:") and self.tokens is not None:
            return self.tokens.by_id(caller.key.removeprefix("token:")) is not None
        return True

    # -- behind the guard -------------------------------------------------------------------

    def caller(self, header: str | None) -> Caller:
        """Returns the caller by the header that the guard has set. Raises ConsoleError (401) if there is none, or the
        session has ended."""
        if not self.guarded:
            return LOCAL
        try:
            caller = from_header(header or "")
        except ValueError:
            caller = None
        if caller is None or not self.still(caller):
            raise ConsoleError(401, "unauthorized", "the session has ended; load the page again and sign in")
        return caller

    def operator(self, header: str | None) -> str:
        """Returns the name under which an operator acts. Raises ConsoleError (401, 403)."""
        caller = self.caller(header)
        if not caller.operates:
            raise ConsoleError(
                403,
                "forbidden",
                f"{caller.name} may look at everything, and change nothing: that takes the role operate",
            )
        return caller.name


def caller_of(access: Access, headers: Mapping[str, str]) -> Caller:
    return access.caller(headers.get(CALLER))


def _digest(text: str) -> bytes:
    """Returns a digest, which has the same length for all tokens, so that comparing takes the same time."""
    return hashlib.sha256(text.encode()).digest()


def _cookies(headers: Headers) -> dict[str, str]:
    return cookie_parser(headers.get("cookie", ""))


class Security:
    """The security services of a console. access: open to everybody until the server sets another one."""

    def __init__(self, database: Database) -> None:
        self.tokens = Tokens(TokenStore(database))
        self.audit = AuditLog(AuditStore(database))
        self.access = Access()

    def close(self) -> None:
        self.tokens.close()


class AuditLog:
    """Records who did what. Thread-safe. Its methods raise ConsoleError (503)."""

    def __init__(self, store: AuditStore) -> None:
        self._store = store

    def record(self, actor: str, action: str, target: str = "", *, job_id: str | None = None, detail: str = "") -> None:
        """Adds a line. actor: the name of a token or an account. For the others see db.access.audit_row."""
        with storing():
            self._store.add(audit_row(named(actor), action, target, job_id=job_id, detail=detail))

    def read(self, after: int = 0, limit: int = 200, job_id: str | None = None) -> list[Record]:
        """Returns the lines with an id > after, oldest first."""
        with storing():
            return self._store.read(after=after, limit=limit, job_id=job_id)
