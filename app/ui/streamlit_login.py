"""Streamlit's own login (st.login), for the guard in front of it.

Its pages can't ask who somebody is before their WebSocket is open, and through that all data would
flow: so the guard sends people to Streamlit's login itself, and reads the cookie that it signs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from openrecycle.app.security.sign_in import LOGIN_STREAMLIT


class StreamlitLogin:
    """See app.security.sign_in.Login."""

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
