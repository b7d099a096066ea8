"""A browser's session with the console's pages, without the browser: Streamlit's own messages over its WebSocket."""

from __future__ import annotations

import time

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.sync.client import connect
from websockets.typing import Subprotocol

TIMEOUT_SECONDS = 60.0


class PageSession:
    """Opens the page at `query` (`job=...`) of the console at this port, with all that it draws."""

    def __init__(self, port: int, query: str = "") -> None:
        self._query = query
        self._socket = connect(
            f"ws://127.0.0.1:{port}/_stcore/stream", subprotocols=[Subprotocol("streamlit")], max_size=2**28, proxy=None
        )
        self._kept: set[str] = set()  # hashes of what a browser would not be sent again
        self._page, self._fragment = "", ""

    def run(self) -> tuple[float, int]:
        """Has the page's script run from its beginning: seconds until all of it is here, and bytes.

        Raises RuntimeError where the script failed.
        """
        return self._run(BackMsg())

    def refresh(self) -> tuple[float, int]:
        """Has the part run that the page itself has run every few seconds; as `run`, which must have been."""
        message = BackMsg()
        message.rerun_script.fragment_id, message.rerun_script.page_script_hash = self._fragment, self._page
        message.rerun_script.is_auto_rerun = True
        return self._run(message)

    def _run(self, message: BackMsg) -> tuple[float, int]:
        message.rerun_script.query_string = self._query
        message.rerun_script.cached_message_hashes.extend(self._kept)
        began, size = time.monotonic(), 0
        self._socket.send(message.SerializeToString())
        while True:
            data = self._socket.recv(timeout=TIMEOUT_SECONDS)
            assert isinstance(data, bytes)
            size += len(data)
            told = ForwardMsg()
            told.ParseFromString(data)
            if told.metadata.cacheable:
                self._kept.add(told.hash)
            match told.WhichOneof("type"):
                case "new_session":
                    self._page = told.new_session.page_script_hash
                case "auto_rerun":
                    self._fragment = told.auto_rerun.fragment_id
                case "delta" if told.delta.new_element.WhichOneof("type") == "exception":
                    raise RuntimeError(told.delta.new_element.exception.message)
                case "script_finished" if told.script_finished != ForwardMsg.FINISHED_EARLY_FOR_RERUN:
                    return time.monotonic() - began, size

    def close(self) -> None:
        self._socket.close()
