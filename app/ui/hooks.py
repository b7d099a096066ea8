"""What the server gives Streamlit to call, and takes of its login. Only app/server.py imports it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import structlog

from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.security.sign_in import LOGIN_STREAMLIT

log = structlog.get_logger()


def page_failed(error: Exception) -> bool:
    """For st.App: of whatever a page, a part of one that is drawn anew by itself, or a callback let through.

    True: nothing else is shown of it, but a sentence, with all of it in the log.
    """
    import streamlit as st  # here: who wants the login alone does without

    if isinstance(error, ConsoleError):
        st.error(str(error))
        return True
    mark = secrets.token_hex(4)
    log.error("a page could not be drawn", mark=mark, exc_info=error)
    st.error(
        f"This part of the page could not be drawn: an error of the console, in its log under {mark}. "
        "No job is touched by it. Load the page again; if that does not help, restart the console. Training goes on "
        "meanwhile, unless a worker dies: then the others wait for the console. What jobs report is kept."
    )
    return True


class StreamlitLogin:
    """Streamlit's own login (st.login), for the guard in front of it; see app.security.sign_in.Login.

    Streamlit's pages can't ask who somebody is before their WebSocket is open, and through that all data would
    flow: so the guard sends people to Streamlit's login itself, and reads the cookie that it signs.
    """

    def claims(self, cookies: Mapping[str, str]) -> Mapping[str, Any]:
        from streamlit.web.server.starlette.starlette_server_config import USER_COOKIE_NAME
        from streamlit.web.server.starlette.starlette_websocket import _get_signed_cookie_with_chunks

        if USER_COOKIE_NAME not in cookies:
            return {}
        signed = _get_signed_cookie_with_chunks(dict(cookies), USER_COOKIE_NAME)
        claims = json.loads(signed) if signed else {}
        return claims if isinstance(claims, dict) and claims.get("is_logged_in") is True else {}

    def start(self, provider: str) -> str:
        from streamlit.auth_util import encode_provider_token

        return f"{LOGIN_STREAMLIT}?{urlencode({'provider': encode_provider_token(provider or 'default')})}"
