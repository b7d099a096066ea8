"""How people sign in: with a token, which a signed cookie stands for, or with an account of an OpenID Connect provider.

Streamlit has a login of its own, which does the protocol and keeps who it was in a signed cookie; here is which role
that account has.
"""

from __future__ import annotations

import html
import stat
import time
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from starlette.responses import HTMLResponse, Response

from openrecycle.app.runtime.errors import SettingsError
from openrecycle.app.runtime.settings import OidcSettings
from openrecycle.app.security.callers import Caller, Role

COOKIE = "openrecycle_session"
SESSION_SECONDS = 12 * 3600


def local(path: str) -> str:
    """A path of this server, whatever was asked for: never another site."""
    is_local = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_local else "/"


def login_page(
    back: str, message: str, status: int, providers: Sequence[str] = (), *, of_account: bool = False
) -> Response:
    """back: the path to go to afterwards. providers: whose accounts are taken; "" for one without a name.

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
# As long as a session by token: whoever leaves the company is out by the end of the day.
SIGNED_IN_SECONDS = 12 * 3600
_SHARED = ("redirect_uri", "cookie_secret")
_OF_PROVIDER = ("client_id", "client_secret", "server_metadata_url")


def role_of(oidc: OidcSettings, claims: Mapping[str, Any]) -> Role | None:
    """Of the account that a provider has vouched for."""
    for patterns, role in ((oidc.operators, Role.OPERATE), (oidc.viewers, Role.VIEW)):
        if any(_fits(pattern, claims) for pattern in patterns):
            return role
    return None


def signed_in(oidc: OidcSettings, claims: Mapping[str, Any]) -> Caller | None:
    """None: no role, or signed in too long ago. claims: of an ID token that was checked."""
    role, at = role_of(oidc, claims), claims.get("iat")
    if role is None or not isinstance(at, int | float) or time.time() >= at + SIGNED_IN_SECONDS:
        return None
    name = account(claims)
    return Caller(f"oidc:{name}", name, role, until=at + SIGNED_IN_SECONDS)


class Login(Protocol):
    """What Streamlit does of it."""

    def claims(self, cookies: Mapping[str, str]) -> Mapping[str, Any]:
        """Of who has signed in by these cookies; {} for nobody."""

    def start(self, provider: str) -> str:
        """The path at which signing in with this provider begins; it is good for minutes."""


def account(claims: Mapping[str, Any]) -> str:
    return str(claims.get("email") or claims.get("sub") or "unknown")[:80]


def _fits(pattern: str, claims: Mapping[str, Any]) -> bool:
    if pattern.startswith(GROUP):
        groups = claims.get("groups")
        return isinstance(groups, list) and pattern.removeprefix(GROUP) in groups
    email = claims.get("email")
    # An address that the provider has not verified is what somebody typed.
    verified = claims.get("email_verified", True) in (True, "true")
    return isinstance(email, str) and verified and fnmatchcase(email.casefold(), pattern.casefold())


def read_oidc(file: Path, operators: Sequence[str], viewers: Sequence[str]) -> OidcSettings:
    """Raises SettingsError, which names the field and never a secret."""
    for option, patterns in (("--oidc-operators", operators), ("--oidc-viewers", viewers)):
        for pattern in patterns:
            if "@" not in pattern and not (pattern.startswith(GROUP) and len(pattern) > len(GROUP)):
                raise SettingsError(f"{option}: got {pattern!r}, expected ada@example.org, *@example.org or group:NAME")
    if not operators and not viewers:
        raise SettingsError("--oidc: nobody could sign in; expected --oidc-operators, --oidc-viewers or both beside it")
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        document = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingsError(f"--oidc {file} can't be read: {why}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"--oidc {file} is not TOML: {error}") from None
    if mode & 0o077:
        raise SettingsError(f"--oidc {file} has mode {mode:04o}, expected 0600: others must not read it")
    auth = document.get("auth")
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
