"""A browser's session with the console's pages, without the browser: Streamlit's own messages over its WebSocket."""

from __future__ import annotations

import time

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.sync.client import connect

PATIENCE_SECONDS = 60.0


class PageSession:
    """Opens the page at `query` (`job=...`) of the console at this port, with all that it draws."""

    def __init__(self, port: int, query: str = "") -> None:
        self._query = query
        self._socket = connect(
            f"ws://127.0.0.1:{port}/_stcore/stream", subprotocols=["streamlit"], max_size=2**28, proxy=None
        )

    def run(self) -> tuple[float, int]:
        """Has the page's script run from its beginning: seconds until all of it is here, and bytes.

        Raises RuntimeError where the script failed.
        """
        message = BackMsg()
        message.rerun_script.query_string = self._query
        began, size = time.monotonic(), 0
        self._socket.send(message.SerializeToString())
        while True:
            data = self._socket.recv(timeout=PATIENCE_SECONDS)
            assert isinstance(data, bytes)
            size += len(data)
            told = ForwardMsg()
            told.ParseFromString(data)
            if told.WhichOneof("type") == "delta" and told.delta.new_element.WhichOneof("type") == "exception":
                raise RuntimeError(told.delta.new_element.exception.message)
            if told.WhichOneof("type") == "script_finished":
                return time.monotonic() - began, size

    def close(self) -> None:
        self._socket.close()
