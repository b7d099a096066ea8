"""Who somebody is, by a bearer token, by the cookie of /login, or by the account that they signed in with."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.runner import in_thread
from openrecycle.app.security.callers import CALLER, LOCAL, Caller, Role, from_header
from openrecycle.app.security.limits import WrongTokens
from openrecycle.app.security.login import COOKIE, SESSION_SECONDS
from openrecycle.app.security.oidc import Login, role_of, signed_in
from openrecycle.app.security.tokens import Tokens
from openrecycle.app.settings import OidcSettings

CONSOLE = "console"


class Access:
    """token: the one that the console was started with; None: everybody may do everything. oidc, login:
    where people may sign in with an account."""

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
        # Of cookies: whoever has one learns nothing of the token, and a new token ends all sessions.
        self._key = hmac.new((token or "").encode(), b"openrecycle sessions", hashlib.sha256).digest()

    # -- on a request -----------------------------------------------------------------------

    async def by_token(self, given: str, address: str) -> Caller | None:
        """Whose token it is. Raises ConsoleError: 429 after too many wrong ones, 503."""
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
        """Of the account that somebody has signed in with, whether it has a role or not."""
        return self.login.claims(cookies) if self.login is not None else {}

    def stranger(self, headers: Headers) -> Mapping[str, Any]:
        """The claims of an account without a role."""
        claims = self.claims(_cookies(headers)) if self.oidc is not None else {}
        return claims if claims and self.oidc is not None and role_of(self.oidc, claims) is None else {}

    # -- sessions ---------------------------------------------------------------------------

    def session(self, caller: Caller, until: float | None = None) -> str:
        """The cookie's value: until when, which token, and both under the console's key."""
        ends = min(caller.until, time.time() + SESSION_SECONDS) if until is None else until
        text = f"{int(ends)}.{caller.key}"
        return f"{text}.{hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()}"

    def _by_session(self, value: str) -> Caller | None:
        text, _, mac = value.rpartition(".")
        if not hmac.compare_digest(
            mac.encode(), hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest().encode()
        ):
            return None
        ends, _, key = text.partition(".")
        if not self.guarded or time.time() >= int(ends):
            return None
        if key == CONSOLE:
            return Caller(CONSOLE, "administrator", Role.ADMINISTER, until=float(ends))
        token = self.tokens.by_id(key.removeprefix("token:")) if self.tokens is not None else None
        if token is None:
            return None
        return Caller(key, token.name, token.role, token.job_id, min(float(ends), token.caller.until))

    def still(self, caller: Caller) -> bool:
        """Has the session not ended, and was the token not revoked meanwhile?"""
        if time.time() >= caller.until:
            return False
        if caller.key.startswith("token:") and self.tokens is not None:
            return self.tokens.by_id(caller.key.removeprefix("token:")) is not None
        return True

    def used(self, caller: Caller) -> bool:
        """As `still`, of another request with the same token; it counts as one."""
        good = self.still(caller)
        if good and caller.key.startswith("token:") and self.tokens is not None:
            self.tokens.note(caller.key.removeprefix("token:"))
        return good

    # -- behind the guard -------------------------------------------------------------------

    def caller(self, header: str | None) -> Caller:
        """Who sent a request, by the header that the guard has put on it. Raises ConsoleError (401) where none did."""
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
        """The name under which an operator acts. Raises ConsoleError (401, 403)."""
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
    """Equally long for all tokens: comparing takes equally long."""
    return hashlib.sha256(text.encode()).digest()


def _cookies(headers: Headers) -> dict[str, str]:
    return cookie_parser(headers.get("cookie", ""))
