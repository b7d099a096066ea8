"""A small OpenID Connect provider: discovery, authorization code with PKCE, token, keys. It asks nobody for
a password: whoever comes is the account that `claims` says."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT, SECRET = "openrecycle", "the-clients-secret"


class IdentityProvider:
    """On a free port of loopback, at `root`. claims: of the account that signs in next. refuses: it denies."""

    def __init__(self) -> None:
        self.claims: dict[str, Any] = {}
        self.refuses = False
        self.age = 0.0  # seconds since the account signed in
        self.key = RSAKey.generate_key(2048, {"kid": "test", "use": "sig", "alg": "RS256"})
        self.signs_with = self.key
        self.codes: dict[str, dict[str, str]] = {}
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                if url.path == "/authorize":
                    self.send_response(302)
                    self.send_header("Location", provider.authorize(query))
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                elif url.path == "/.well-known/openid-configuration":
                    self.answer(provider.metadata())
                else:
                    self.answer({"keys": [provider.key.as_dict(private=False)]})

            def do_POST(self) -> None:
                form = self.rfile.read(int(self.headers["Content-Length"])).decode()
                wanted = {name: values[0] for name, values in parse_qs(form).items()}
                basic = self.headers.get("Authorization", "").removeprefix("Basic ")
                user, _, password = base64.b64decode(basic).decode().partition(":")
                known = (user or wanted.get("client_id"), password or wanted.get("client_secret")) == (CLIENT, SECRET)
                found = provider.token(wanted) if known else None
                self.answer(found or {"error": "invalid_grant"}, 200 if found else 400)

            def answer(self, body: dict[str, Any], status: int = 200) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.root = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def secrets_toml(self) -> str:
        """What a console is told of it, in the form of Streamlit's secrets."""
        return (
            '[auth]\nredirect_uri = "http://127.0.0.1:{port}/oauth2callback"\n'
            f'cookie_secret = "{"c" * 40}"\nclient_id = "{CLIENT}"\nclient_secret = "{SECRET}"\n'
            f'server_metadata_url = "{self.root}/.well-known/openid-configuration"\n'
        )

    def metadata(self) -> dict[str, Any]:
        return {
            "issuer": self.root,
            "authorization_endpoint": f"{self.root}/authorize",
            "token_endpoint": f"{self.root}/token",
            "jwks_uri": f"{self.root}/keys",
            "response_types_supported": ["code"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["RS256"],
            "code_challenge_methods_supported": ["S256"],
        }

    def authorize(self, query: dict[str, str]) -> str:
        assert (query["client_id"], query["response_type"]) == (CLIENT, "code")
        assert query["code_challenge_method"] == "S256"
        if self.refuses:
            return f"{query['redirect_uri']}?{urlencode({'error': 'access_denied', 'state': query['state']})}"
        code = secrets.token_urlsafe(16)
        self.codes[code] = query
        return f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}"

    def token(self, wanted: dict[str, str]) -> dict[str, Any] | None:
        asked = self.codes.pop(wanted.get("code", ""), None)
        if asked is None or asked["redirect_uri"] != wanted["redirect_uri"]:
            return None
        digest = hashlib.sha256(wanted["code_verifier"].encode()).digest()
        if base64.urlsafe_b64encode(digest).decode().rstrip("=") != asked["code_challenge"]:
            return None
        at = int(time.time() - self.age)
        claims = {"iss": self.root, "aud": CLIENT, "iat": at, "exp": int(time.time()) + 600, "nonce": asked["nonce"]}
        token = jwt.encode({"alg": "RS256", "kid": "test"}, claims | {"sub": "1"} | self.claims, self.signs_with)
        return {"access_token": "unused", "token_type": "Bearer", "expires_in": 600, "id_token": token}
