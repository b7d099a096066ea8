"""Has large plans put into columns (planner.packed), in processes of their own, one after the other."""

from __future__ import annotations

import gc
import queue
import threading
import zlib
from collections.abc import Callable

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.app.runtime.children import Channel, ChildEnded, Children
from openrecycle.app.runtime.garbage_collection import LARGE_OPS
from openrecycle.db.plan_columns import PlanColumns
from openrecycle.planner.errors import PlannerError
from openrecycle.planner.packed import decode_header, pack
from openrecycle.planner.plan import Plan

log = structlog.get_logger()

# Beyond this a process has gone astray.
PATIENCE = 600.0


class Packing:
    """Thread-safe. on_packed: called with the fingerprint of each plan whose columns have been stored."""

    def __init__(self, columns: PlanColumns, on_packed: Callable[[str], None]) -> None:
        self._columns = columns
        self._on_packed = on_packed
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._thread: threading.Thread | None = None
        self._children = Children(put_into_columns, name="packing")
        self._closed = False

    def want(self, fingerprint: str, ops: int) -> None:
        """Asks once for each plan; small ones are read quickly enough as they are."""
        with self._lock:
            if ops <= LARGE_OPS or self._closed or fingerprint in self._asked:
                return
            self._asked.add(fingerprint)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="packing", daemon=True)
                self._thread.start()
        self._queue.put(fingerprint)

    def close(self) -> None:
        """Ends what runs; plans that have no columns yet are read as documents."""
        with self._lock:
            self._closed = True
        self._children.close()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(10)

    def _run(self) -> None:
        while (fingerprint := self._queue.get()) is not None and not self._closed:
            try:
                document = self._columns.deflated_document(fingerprint)
                data = self._children.ask(document, patience=PATIENCE) if document is not None else None
                if data:
                    self._columns.put(fingerprint, data)
                    self._on_packed(fingerprint)
            except (ChildEnded, SQLAlchemyError) as error:
                if not self._closed:
                    log.warning("a plan has no columns; it is read as a document", reason=type(error).__name__)


def put_into_columns(channel: Channel, document: bytes) -> None:
    """In a child."""
    gc.disable()  # a million lists would be looked through again and again, and all goes with the process
    if data := packed(document):
        channel.say(data)


def packed(document: bytes) -> bytes:
    """The columns of a deflated document; empty: they can't hold it."""
    try:
        data = pack(Plan.from_json(zlib.decompress(document)))
        return data if decode_header(data).form == "columns" else b""
    except (PlannerError, zlib.error, MemoryError) as error:
        log.warning("a stored plan can't be put into columns", reason=str(error))
        return b""
