"""The HTTP session with the console: token, time-outs, back-off, and errors that say what happened. No torch here.

A console may have a standby, which takes over when the console is gone. Then `url` holds both addresses, with a comma
between, and a request that one of them does not take goes to the other.

This file also has the queues of what waits to be passed on: messages (`Outbox`) and log lines (`LogTail`) for a
console, and the lines of a run's record (`Delivery`, `Record`) for targets that may be slow or broken: a callback, a
terminal, a disk.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import logging
import math
import os
import random
import re
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

import requests
from pydantic import BaseModel, ValidationError

from openrecycle.agent.messages.protocol import (
    AGENT_TOKEN,
    API,
    DEPOSED,
    LATEST,
    LEAD,
    LOG_LINE,
    LOG_LINES,
    ClockReading,
    LogLine,
    Message,
    ProblemDetails,
    clock_name,
)
from openrecycle.planner.jobs.errors import InputError, PlannerError
from openrecycle.planner.plans.packed import unpack_named
from openrecycle.planner.plans.plan import Plan, read_model

Say = Callable[[str], None]
"""Takes a line for the person who has started this program."""

# -- messages that wait for a console, oldest first, in bounded memory -------------------------------

T = TypeVar("T")


class Outbox(Generic[T]):
    """A queue of messages, oldest first. Any thread may call `put`, which never blocks. Only the sending thread calls
    `take`, `sent` and `unsent`.

    limit: how many messages may wait; beyond it, the oldest message of the least `weight` is dropped. merge: joins a
    waiting message and a new one into one, or returns None. It is tried on the newest waiting message, and on earlier
    ones as long as each that was tried weighs less than the new one. The message that is being sent is never dropped or
    merged.
    """

    def __init__(
        self,
        limit: int,
        *,
        merge: Callable[[T, T], T | None] | None = None,
        weight: Callable[[T], int] = lambda _message: 0,
    ) -> None:
        self._limit, self._merge, self._weight = limit, merge, weight
        self._waiting: deque[T] = deque()
        self._in_hand: T | None = None
        self._lock = threading.Lock()
        self.dropped = 0
        """How many messages were dropped because there were too many."""

    def __len__(self) -> int:
        return len(self._waiting) + (self._in_hand is not None)

    @property
    def all(self) -> list[T]:
        """All messages, oldest first, with the one that is being sent."""
        with self._lock:
            return [*([] if self._in_hand is None else [self._in_hand]), *self._waiting]

    def put(self, message: T) -> None:
        with self._lock:
            self._add(message)

    def _add(self, message: T) -> None:
        if self._merge is not None and self._merged(self._merge, message):
            return
        self._waiting.append(message)
        if len(self._waiting) > self._limit:
            del self._waiting[self._lightest()]
            self.dropped += 1

    def _merged(self, merge: Callable[[T, T], T | None], message: T) -> bool:
        for index in range(len(self._waiting) - 1, -1, -1):
            merged = merge(self._waiting[index], message)
            if merged is not None:
                self._waiting[index] = merged
                return True
            if self._weight(self._waiting[index]) >= self._weight(message):
                break
        return False

    def _lightest(self) -> int:
        """Returns the index of the oldest message of the least weight. No weight is below 0."""
        found, least = 0, math.inf
        for index, waiting in enumerate(self._waiting):
            if (weight := self._weight(waiting)) < least:
                found, least = index, weight
            if not weight:
                break
        return found

    def take(self) -> T | None:
        """Returns the oldest message, and the same again until `sent` is called; None if there is none."""
        with self._lock:
            if self._in_hand is None and self._waiting:
                self._in_hand = self._waiting.popleft()
            return self._in_hand

    def sent(self) -> None:
        """The message of `take` was delivered, or is given up."""
        self._in_hand = None

    def unsent(self) -> None:
        """The message of `take` was not delivered, as far as is known. It waits as before, and later ones may be merged
        into it."""
        with self._lock:
            waiting = [*([] if self._in_hand is None else [self._in_hand]), *self._waiting]
            self._in_hand = None
            self._waiting.clear()
            for message in waiting:
                self._add(message)


# -- the newest lines that a worker process has written, kept for the console ------------------------


class LogTail:
    """Holds lines that were not taken yet, up to a bound; beyond it the oldest are dropped. Thread-safe."""

    def __init__(self) -> None:
        self._lines: deque[LogLine] = deque(maxlen=LOG_LINES)
        self._added = 0
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        """Adds whole lines. Lines that are too long are cut."""
        at = min(max(time.time(), 0.0), LATEST)  # a clock may be set to anything
        for line in text.splitlines():
            if line := line.rstrip():
                clean = "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line)
                with self._lock:
                    self._lines.append(LogLine(at=at, text=clean[:LOG_LINE]))
                    self._added += 1

    def extend(self, lines: Iterable[tuple[float, str]], skipped: int) -> None:
        """Adds lines that another tail had taken, with their POSIX seconds. skipped: how many it had dropped before."""
        with self._lock:
            for at, text in lines:
                self._added += 1
                with suppress(ValidationError):  # a console would refuse it
                    self._lines.append(LogLine(at=at, text=text))
            self._added += skipped

    def put_back(self, lines: Sequence[LogLine], skipped: int) -> None:
        """Puts back lines that were taken, but did not arrive."""
        with self._lock:
            self._lines = deque([*lines, *self._lines][-LOG_LINES:], LOG_LINES)
            self._added += len(lines) + skipped

    def take(self) -> tuple[tuple[LogLine, ...], int]:
        """Returns the lines since the last call, and how many before them were dropped."""
        with self._lock:
            lines, skipped = tuple(self._lines), self._added - len(self._lines)
            self._lines.clear()
            self._added = 0
        return lines, skipped


class Followed:
    """A text stream, such as sys.stdout, that also copies its lines into a LogTail. Writing to it never raises OSError:
    whoever prints is not to blame for a full disk, or for a reader that is gone.

    tail: None: no lines are copied. lost: called with the first error.
    """

    def __init__(
        self, stream: TextIO, tail: LogTail | None, lost: Callable[[OSError], None] = lambda _error: None
    ) -> None:
        self._stream, self._tail, self._part = stream, tail, ""
        self._lost: Callable[[OSError], None] | None = lost

    def write(self, text: str) -> int:
        if self._tail is not None:
            self._follow(text, self._tail)
        self._attempt(lambda stream: stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._attempt(lambda stream: stream.flush())

    def _attempt(self, write: Callable[[TextIO], object]) -> None:
        try:
            write(self._stream)
        except OSError as error:
            lost, self._lost = self._lost, None
            if lost is not None:
                lost(error)

    def _follow(self, text: str, tail: LogTail) -> None:
        self._part += text
        if "\n" in self._part:
            whole, _, self._part = self._part.rpartition("\n")
            tail.add(whole)
        elif len(self._part) > LOG_LINE:
            tail.add(self._part)
            self._part = ""

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextlib.contextmanager
def prints_anyway() -> Iterator[None]:
    """Makes printing raise no OSError inside the block, in which code of others may print."""
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        if stream is not None:  # None: it was closed when Python began, and nothing is printed
            setattr(sys, name, Followed(stream, None))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


# -- a run's record on its way -----------------------------------------------------------------------

# The launcher's loop judges its workers by when it hears them, so nothing slow may run in it. So each target has its
# own thread and bounded queue. Beyond the bound the oldest waiting iterations are left out, and the target is told how
# many; failures, checkpoints, warnings and the final line are always kept.

log = logging.getLogger("openrecycle")

Line = dict[str, Any]
LIMIT = 10_000
"""How many lines may wait for one target."""
SLOW = 1_000
"""From so many waiting lines on, there is a warning."""
RETRY_SECONDS = 2.0
HURRIED_SECONDS = 2.0
"""How long a hanging target is waited for while somebody wants the program to end."""


class Delivery:
    """Calls `target` with each line, in order, in a thread of its own. A call of this object never blocks or raises.

    what: names the target, in words. warn: called in another thread, with a sentence, when the target is far behind.
    Where lines had to be left out, the target gets a `warning` line in their place. begin: called first in the thread.
    """

    def __init__(
        self,
        target: Callable[[Line], None],
        what: str,
        warn: Callable[[str], None],
        *,
        limit: int = LIMIT,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._target, self._what, self._warn, self._limit, self._begin = target, what, warn, limit, begin
        self._lines: Outbox[Line] = Outbox(limit, weight=lambda line: "loss" not in line)
        self._there, self._closing = threading.Event(), threading.Event()
        self._said_slow = False
        self._thread = threading.Thread(target=self._deliver, name=what, daemon=True)
        self._thread.start()

    @property
    def left_out(self) -> int:
        """How many lines `target` did not get."""
        return self._lines.dropped

    def __call__(self, line: Line) -> None:
        self._lines.put(line)
        self._there.set()
        if not self._said_slow and len(self._lines) >= min(SLOW, self._limit):
            self._said_slow = True
            text = (
                f"{self._what} is {len(self._lines)} lines behind; training goes on, "
                f"and beyond {self._limit} the oldest iterations are left out"
            )
            # In a thread of its own, since `warn` may be just as slow.
            threading.Thread(target=self._warn, args=(text,), daemon=True).start()

    def close(self, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Waits until `target` has had every line. Gives up after HURRIED_SECONDS during which `hurried` returns True.
        Returns whether it has had every line."""
        self._closing.set()
        self._there.set()
        left = HURRIED_SECONDS
        while self._thread.is_alive() and left > 0:
            self._thread.join(0.1)
            left -= 0.1 if hurried() else 0.0
        return not self._thread.is_alive()

    def _deliver(self) -> None:
        self._guarded(self._begin)
        said = 0
        while True:
            while (line := self._lines.take()) is not None:
                if (dropped := self._lines.dropped) > said:
                    text = f"{dropped - said} iterations are missing here: {self._what} was {self._limit} lines behind"
                    self._guarded(self._target, {"warning": text})
                    said = dropped
                self._guarded(self._target, line)
                self._lines.sent()
            if self._closing.is_set() and not len(self._lines):
                return
            self._there.wait()
            self._there.clear()

    def _guarded(self, call: Callable[..., None], *arguments: Line) -> None:
        try:
            call(*arguments)
        except Exception:  # whatever the target raises, the next lines are delivered
            log.exception("%s failed", self._what)


class RecordFile:
    """Writes lines to a JSON-lines file, each at once. It runs in the thread of a Delivery.

    A full disk loses nothing: a problem is reported through `say` at once, and the lines wait in memory, and are tried
    again until they can be written or the job is over. Raises OSError where the file can't be opened.

    The file is a new one where that is possible, and an earlier one is kept beside it, with a number in its name. The
    earlier one may still be written to: by a former leading launcher that does not yet know that it no longer leads.
    """

    def __init__(self, path: Path, say: Say) -> None:
        self._path, self._say = path, say
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):  # in this folder nothing may be renamed
                number = next(n for n in itertools.count(1) if not path.with_name(f"{path.name}.{n}").exists())
                path.rename(path.with_name(f"{path.name}.{number}"))
                say(f"note: the record that was at {path} is now called {path.name}.{number}")
        self._file = path.open("wb", buffering=0)
        self._over = threading.Event()
        self.lost = 0
        """How many lines could not be written before the job was over."""

    def __call__(self, line: Line) -> None:
        self.write((json.dumps(line) + "\n").encode())

    def write(self, lines: bytes) -> None:
        """Writes lines in the form of the file."""
        if self.lost:
            self.lost += lines.count(b"\n")  # once lines were lost, no more are written, so the file has no gap
            return
        rest, failing = lines, False
        while rest:
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as error:
                if not failing:
                    failing = True
                    self._say(
                        f"warning: the record {self._path} can't be written ({error.strerror}); "
                        "training goes on, and writing is tried again"
                    )
                if self._over.wait(RETRY_SECONDS):
                    self.lost = rest.count(b"\n")
                    return
        if failing:
            self._say(f"the record {self._path} is being written again, and lacks nothing")

    def end(self) -> None:
        """The job is over. What can't be written now is given up."""
        self._over.set()


class Record:
    """The file of a run's record, which is written beside the training. say: called in any thread, with problems of the
    file. earlier: lines in the form of the file, of a launcher that led before; they are read in the thread that
    writes, so that nobody waits for them. Raises InputError where the file can't be opened."""

    def __init__(self, path: Path, say: Say, earlier: Iterable[bytes] = ()) -> None:
        try:
            self._file = RecordFile(path, say)
        except OSError as error:
            raise InputError("record", str(path), f"a file that can be written ({error.strerror})") from None

        def begin() -> None:
            for lines in earlier:
                self._file.write(lines)

        self._path, self._say = path, say
        self._delivery = Delivery(self._file, f"the record {path}", say, begin=begin)

    def __call__(self, line: Line) -> None:
        self._delivery(line)

    def close(self, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Ends the writing. Returns whether the file has every line; if not, says so. hurried: see Delivery.close."""
        self._file.end()
        whole = self._delivery.close(hurried)
        if missing := self._file.lost + self._delivery.left_out + (not whole):
            self._say(f"the record {self._path} is not whole: {missing} lines are missing")
        return not missing


# -- HTTP session with the console --------------------------------------------------------------

M = TypeVar("M", bound=BaseModel)

CONNECT_SECONDS = 5.0
# With several addresses: the first time-out of an answer, and the longest long-poll.
FIRST_TIMEOUT_SECONDS = 3.0
SHORT_POLL_SECONDS = 5.0


class ConsoleUnavailable(Exception):
    """No answer, a 5xx, or too many requests: to try later may help. silent: did some address not answer at all?"""

    def __init__(self, detail: str = "", *, silent: bool = False) -> None:
        super().__init__(detail)
        self.silent = silent


class JobUnknown(ConsoleUnavailable):
    """The console does not have the job, though it has talked with its launcher before: it has another database, or
    can't read the job's rows, or somebody has deleted a job of which no worker was heard. None of this is a reason to
    end a training, but people should know of it."""


class ConsoleWaits(ConsoleUnavailable):
    """The console answers that it can do nothing now, as when its database is away. A restart would not help."""


class ConsoleRefused(Exception):
    """A 4xx: the same request would be refused again. `problem.code` is for programs."""

    def __init__(self, problem: ProblemDetails) -> None:
        self.problem = problem
        text = problem.detail or problem.title
        if problem.status == 401:
            text += "; give it by --token-file or OPENRECYCLE_TOKEN; in Python: Console(token=...), Reporter(token=...)"
        super().__init__(text)


class ConsoleClient:
    """A session with the console. Threads must not share one: make one per thread.

    url: one address or several; the one that answered last is asked first. token: sent as a bearer token, never logged
    or put into an address. timeout: seconds to wait for an answer. known: the console has accepted the token and its
    own name in the address, and known the job, before. issued: the token that the console has given out for the job
    created here; None: none. lead: of a launcher that leads several nodes, its term and node
    (agent.coordination.membership). deposed: called with a sentence whenever the console says that another node leads
    now.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 10.0,
        known: bool = False,
        lead: str | None = None,
        deposed: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._urls = [part.strip().rstrip("/") for part in url.split(",")]
        self._at = 0
        self._timeout, self._known = timeout, known
        self._current_timeout = self._first_timeout()
        self._session = requests.Session()
        # No proxies from the environment, for a console on this machine.
        self._session.trust_env = False
        # That switches this variable off, too, which is needed for a certificate authority of one's own.
        self._session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        self.issued: str | None = None
        self.token = token
        if token:
            # A token from a file or a variable may end with a newline, which no header can have.
            self._session.headers["Authorization"] = f"Bearer {token.strip()}"
        self._deposed = deposed
        if lead is not None:
            self._session.headers[LEAD] = lead

    @property
    def url(self) -> str:
        """The address that is asked first."""
        return self._urls[self._at]

    def post(self, path: str, message: Message, reply: type[M] | None = None, *, key: str | None = None) -> M | None:
        """POSTs `message`. Returns the answer as a `reply`, or None. key: an idempotency key.

        Raises ConsoleUnavailable or ConsoleRefused.
        """
        headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
        return self._call("POST", path, reply, data=message.model_dump_json().encode(), headers=headers)

    def get(self, path: str, reply: type[M], *, wait: float = 0.0, **params: int | str) -> M | None:
        """GETs `path`. Returns None on 204. wait: seconds that the console may hold back the answer (long-poll). Raises
        as `post`."""
        if len(self._urls) > 1:
            wait = min(wait, SHORT_POLL_SECONDS)
        query: dict[str, str | float] = {**params} | ({"wait": wait} if wait else {})
        return self._call("GET", path, reply, params=query, extra_time=wait)

    def plan(self, job_path: str, fingerprint: str) -> Plan:
        """GETs a plan of a job in its packed form. Raises as `post`."""

        def read(_: type[Plan], data: bytes) -> Plan:
            return unpack_named(data, fingerprint)

        found = self._call("GET", f"{job_path}/plans/{fingerprint}", Plan, read, params={"packed": "true"})
        assert found is not None
        return found

    def _call(
        self,
        method: str,
        path: str,
        reply: type[M] | None,
        read: Callable[[type[M], bytes], M] = read_model,
        *,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
        params: dict[str, str | float] | None = None,
        extra_time: float = 0.0,
    ) -> M | None:
        body = {"data": data, "headers": headers, "params": params}
        answer = self._ask(method, path, extra_time, body)
        if answer.status_code >= 400:
            problem = _problem(answer)
            if problem.code == DEPOSED:
                self._deposed(problem.detail)
            raise ConsoleRefused(problem)
        self._known = True
        self.issued = answer.headers.get(AGENT_TOKEN, self.issued)
        if reply is None or answer.status_code == 204:
            return None
        try:
            return read(reply, answer.content)
        except (ValidationError, PlannerError):
            raise ConsoleUnavailable(f"{self.url}{API}{path} answered something else than {reply.__name__}") from None

    def _ask(self, method: str, path: str, extra_time: float, body: dict[str, Any]) -> requests.Response:
        """Returns the answer of the first address that takes the request. Raises ConsoleUnavailable if none does."""
        reasons, first, silent = [], self._at, False
        kind: type[ConsoleUnavailable] = ConsoleUnavailable
        for turn in range(len(self._urls)):
            at = (first + turn) % len(self._urls)
            url = self._urls[at]
            try:
                timeouts = (min(CONNECT_SECONDS, self._current_timeout), self._current_timeout + extra_time)
                answer = self._session.request(method, f"{url}{API}{path}", timeout=timeouts, **body)
            except requests.RequestException as error:
                trouble = _not_trusted(error) or self._no_authorities(error)
                silent = silent or not trouble
                reasons.append(f"{url} {trouble or f'does not answer ({_reason(error)})'}")
                continue
            except OSError as error:  # the file that REQUESTS_CA_BUNDLE names can't be read
                reasons.append(f"{url} can't be asked ({error})")
                continue
            self._at = at  # even for a standby that refuses: the other one may hang, and would be waited for again
            # A console gives a code with each 4xx. One without a code is from a proxy that has no console behind it.
            code = _problem(answer).code if answer.status_code >= 400 else "unknown"
            refused = code != "unknown" and answer.status_code < 500
            # 408: this process was too slow, as when it was suspended. 429: too many requests. 401, 403 and 421 are no
            # reason to end a job whose token and address were accepted before: the console has other settings now.
            later = answer.status_code in (408, 429) or (answer.status_code in (401, 403, 421) and self._known)
            if code == "unknown_job" and self._known:
                later, kind = True, JobUnknown
            elif code != "unknown" and answer.status_code == 503 and kind is ConsoleUnavailable:
                kind = ConsoleWaits
            if answer.status_code < 400 or (refused and not later):
                self._current_timeout = self._first_timeout()
                return answer
            reasons.append(f"{url} answered {answer.status_code}{_detail(answer)}")
        # A console that is only slow gets more time.
        self._current_timeout = min(2 * self._current_timeout, self._timeout)
        raise kind("; ".join(reasons), silent=silent)

    def _no_authorities(self, error: requests.RequestException) -> str:
        """Returns the reason if no certificate authority can be read here; "": the error has another cause."""
        named = self._session.verify
        if isinstance(error, requests.exceptions.SSLError) and isinstance(named, str) and Path(named).is_file():
            try:
                ssl.create_default_context(cafile=named)
            except ssl.SSLError:
                return f"can't be asked: REQUESTS_CA_BUNDLE names {named}, in which no certificate can be read"
        return ""

    def _first_timeout(self) -> float:
        """Returns a short time-out if there is a standby, which should not wait for a console that hangs."""
        return self._timeout if len(self._urls) == 1 else min(FIRST_TIMEOUT_SECONDS, self._timeout)


# In the order in which they are looked for. To close in the middle of the greetings of TLS is what a proxy does that
# reaches no console.
_REASONS = {
    ssl.SSLEOFError: "connection closed",
    ssl.SSLError: "TLS fails; perhaps it should be http://",
    ConnectionRefusedError: "connection refused",
    socket.gaierror: "unknown host",
    TimeoutError: "timeout",
    ConnectionResetError: "connection closed",
    http.client.IncompleteRead: "connection closed",
    requests.exceptions.ChunkedEncodingError: "connection closed",
    requests.Timeout: "timeout",
}
# Alerts of TLS that a server sends, depending on the version, where a client shows no certificate.
_WANTED = re.compile("CERTIFICATE|HANDSHAKE_FAILURE|UNKNOWN_CA|ACCESS_DENIED")
_ASKS = "it asks for a client's certificate, of which agents have none"


def _reason(error: BaseException) -> str:
    """Returns in words why a request got no answer; the name of the error where there are none."""
    causes = list(_causes(error))
    for cause in causes:
        # Who sends an alert speaks TLS.
        if isinstance(cause, ssl.SSLError) and (alert := re.search("ALERT_(.*)", cause.reason or "")):
            words = alert[1].replace("_", " ").lower()
            if _WANTED.search(alert[1]):
                return f"TLS: {words}; perhaps {_ASKS}"
            return f"TLS: {words}"
    for kind, words in _REASONS.items():
        if any(isinstance(cause, kind) for cause in causes):
            return words
    said = [cause.strerror for cause in causes if isinstance(cause, OSError) and cause.strerror]
    return said[-1] if said else type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error and what has led to it. urllib3 puts some causes into its errors as an argument."""
    while error is not None:
        yield error
        inside = error.args[0] if error.args and isinstance(error.args[0], BaseException) else None
        error = error.__cause__ or error.__context__ or inside


def _not_trusted(error: BaseException) -> str:
    """Returns the reason if the console's certificate is not trusted here; "": the error has another cause."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            named = "set REQUESTS_CA_BUNDLE to a file with the certificates to trust"
            return f"has a certificate that is not trusted here ({cause.verify_message}); {named}"
    return ""


class Backoff:
    """Gives the seconds to wait before the next try. They double, with jitter, up to `longest`. Call `reset` after a
    success."""

    def __init__(self, first: float = 0.2, longest: float = 5.0) -> None:
        self._first, self._longest, self._next = first, longest, first

    def seconds(self) -> float:
        wait, self._next = self._next, min(2 * self._next, self._longest)
        # Not Python's own generator, which threads share, and which is seeded for a job's layers and data.
        return wait * random.SystemRandom().uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next = self._first


def _problem(answer: requests.Response) -> ProblemDetails:
    try:
        return read_model(ProblemDetails, answer.content)
    except ValidationError:
        text = answer.text[:200]
        return ProblemDetails(title=answer.reason or "refused", status=answer.status_code, code="unknown", detail=text)


def _detail(answer: requests.Response) -> str:
    problem = _problem(answer)
    if problem.code != "unknown":
        return f" ({problem.detail[:300]})"
    return f" ({_ASKS})" if re.search("SSL certificate (was sent|error)", answer.text) else ""  # words of nginx


# -- one time axis for processes of several hosts ----------------------------------------------------

# Processes of a host share its monotonic clock, so their times can be compared as they are. The clocks of other hosts
# are compared with the console's: the error is at most half of the shortest of a few round trips, whatever the network
# did in between.

ROUND_TRIPS = 8


@dataclass(frozen=True)
class Offset:
    """Add `microseconds` to times of this clock to get the console's, within ± `uncertainty` microseconds."""

    microseconds: int
    uncertainty: int


def offset_to_console(client: ConsoleClient) -> Offset:
    """Measures the offset of this process's clock. Raises ConsoleUnavailable or ConsoleRefused."""

    def ask() -> ClockReading:
        reading = client.get("/clock", ClockReading)
        assert reading is not None
        return reading

    return measure_offset(ask)


def measure_offset(ask: Callable[[], ClockReading], now: Callable[[], int] = time.monotonic_ns) -> Offset:
    """Measures the offset between two clocks. ask: reads the console's clock. now: reads this one, in nanoseconds."""
    best: Offset | None = None
    for _ in range(ROUND_TRIPS):
        sent = now()
        reading = ask()
        received = now()
        if reading.name == clock_name():
            return Offset(0, 0)
        # Rounded up, since the reading is cut to whole microseconds.
        uncertainty = (received - sent) // 2000 + 2
        if best is None or uncertainty < best.uncertainty:
            best = Offset(reading.microseconds - (sent + received) // 2000, uncertainty)
    assert best is not None
    return best
