"""The page at which people sign in: with a token, or with an account."""

from __future__ import annotations

import html
from collections.abc import Sequence
from urllib.parse import quote

from starlette.responses import HTMLResponse, Response

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
