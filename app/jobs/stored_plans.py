"""Stored plans, read in the quickest way there is: large ones are put into columns (planner.plans.packed), in processes
of their own, one after the other, and the most recently used ones stay parsed."""

from __future__ import annotations

import gc
import queue
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable

import structlog
from sqlalchemy.exc import SQLAlchemyError

from openrecycle.app.runtime.patches import LARGE_OPS, OP_BYTES, building
from openrecycle.app.runtime.processes import Channel, ChildEnded, Children
from openrecycle.db.plan_rows import PlanColumns
from openrecycle.db.store import Store
from openrecycle.planner.jobs.errors import PlannerError
from openrecycle.planner.plans.packed import decode_header, pack, unpack
from openrecycle.planner.plans.plan import Plan, PlanError

log = structlog.get_logger()

# Parsed plans kept in memory; a document's plan of 393,216 ops takes about 40 MB.
_KEEP_PLANS = 64
_KEEP_OPS = 400_000
# Beyond this a process has gone astray.
TIMEOUT = 600.0


def stored_plan(store: Store, fingerprint: str) -> Plan | None:
    """In columns where it has any. Raises PlanError for a document that can't be read, SQLAlchemyError."""
    data = PlanColumns(store.database).get(fingerprint)
    if data is not None:
        try:
            return unpack(data, source=f"plan {fingerprint}")
        except PlanError as error:
            log.warning("the columns of a plan can't be read; its document is", reason=str(error))
    document = store.plan(fingerprint)
    if document is None:
        return None
    with building(len(document) // OP_BYTES):
        return Plan.from_json(document, source=fingerprint)


class PlanCache:
    """Plans by fingerprint, out of the store; the most recently used ones stay parsed. Thread-safe.

    Large ones are put into columns once they are asked for, and are read in no time from then on.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._packing = Packing(PlanColumns(store.database), self._packed)
        self._lock = threading.Lock()
        self._plans: OrderedDict[str, tuple[Plan, dict[str, int]]] = OrderedDict()

    def get(self, fingerprint: str) -> Plan | None:
        found = self._get(fingerprint)
        return found[0] if found else None

    def rerouted(self, fingerprint: str) -> dict[str, int]:
        """worker -> micro-batches of other pipelines that it runs per iteration."""
        found = self._get(fingerprint)
        return found[1] if found else {}

    def _get(self, fingerprint: str) -> tuple[Plan, dict[str, int]] | None:
        with self._lock:
            if found := self._plans.get(fingerprint):
                self._plans.move_to_end(fingerprint)
                return found
        plan = stored_plan(self._store, fingerprint)
        if plan is None:
            return None
        if not plan.in_arrays:
            self._packing.want(fingerprint, plan.op_count)
        found = (plan, plan.rerouted())
        with self._lock:
            self._plans[fingerprint] = found
            ops = sum(p.op_count for p, _ in self._plans.values())
            while len(self._plans) > 1 and (len(self._plans) > _KEEP_PLANS or ops > _KEEP_OPS):
                ops -= self._plans.popitem(last=False)[1][0].op_count
        return found

    def stored(self, plan: Plan) -> None:
        """A plan has been stored, and will be asked for: it need not be read as a document first."""
        if not plan.in_arrays:
            self.will_be_asked_for(plan.fingerprint, plan.op_count)

    def will_be_asked_for(self, fingerprint: str, ops: int) -> None:
        """As `stored`, of a plan that nobody has here."""
        self._packing.want(fingerprint, ops)

    def close(self) -> None:
        """Ends what is done in the background."""
        self._packing.close()

    def _packed(self, fingerprint: str) -> None:
        """Whoever asks next gets the columns, which take a tenth of the memory."""
        with self._lock:
            self._plans.pop(fingerprint, None)


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
                data = self._children.ask(document, timeout=TIMEOUT) if document is not None else None
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
