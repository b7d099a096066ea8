"""Streamlit's own scripts, styles and fonts, each sent in one piece.

A page asks for more than a hundred of them. Starlette hands each to other threads several times, and a large one
once for each 64 KB, which takes its turns with everything else that the process does.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path

from anyio import to_thread
from starlette.types import ASGIApp, Receive, Scope, Send

# Their names carry a hash of their content.
FOLDERS = ("js", "css", "media")
CACHE = b"public, immutable, max-age=31536000"
# More is read in another thread.
AT_ONCE = 256 << 10
_CONDITIONS = {b"if-none-match", b"if-modified-since", b"if-match", b"if-unmodified-since", b"if-range", b"range"}


class StaticFiles:
    """Around Streamlit's application, which answers all else. static: the folder that its page is in."""

    def __init__(self, app: ASGIApp, static: Path) -> None:
        self.app = app
        self._files = {
            f"/static/{folder}/{path.name}": path
            for folder in FOLDERS
            for path in (static / "static" / folder).glob("*.*")
            if path.is_file()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._files.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "GET" else None
        if path is None or any(name in _CONDITIONS for name, _ in scope["headers"]):
            await self.app(scope, receive, send)
            return
        try:
            large = path.stat().st_size > AT_ONCE
            content = await to_thread.run_sync(path.read_bytes) if large else path.read_bytes()
        except OSError:  # another version was installed meanwhile
            await self.app(scope, receive, send)
            return
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        headers = [
            (b"content-type", kind.encode()),
            (b"content-length", str(len(content)).encode()),
            (b"cache-control", CACHE),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})
