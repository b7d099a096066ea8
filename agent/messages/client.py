"""HTTP session with the console: token, time-outs, back-off, and errors that say what happened.

A console may have a standby, which takes over when it is gone. Then there are two addresses: `url` is
both, with a comma between them, and a request that one does not take goes to the other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import requests
from pydantic import BaseModel, ValidationError

from openrecycle.agent.messages.protocol import (
    AGENT_TOKEN,
    API,
    DEPOSED,
    LEAD,
    ClockReading,
    Message,
    ProblemDetails,
    clock_name,
)
from openrecycle.planner.plans.plan import read_model

M = TypeVar("M", bound=BaseModel)

CONNECT_SECONDS = 5.0
# Where there are several addresses: an answer takes so long at first, and a long-poll at most.
FIRST_TIMEOUT_SECONDS = 3.0
SHORT_POLL_SECONDS = 5.0


class ConsoleUnavailable(Exception):
    """No answer, a 5xx, or too many requests: worth another try later."""


class JobUnknown(ConsoleUnavailable):
    """The console has not got the job, whose launcher it has talked with before: it has another database, or can't read
    the job's rows, or somebody has deleted a job that no worker was heard of. None of that is a reason to end a
    training; it is for people to know."""


class ConsoleRefused(Exception):
    """A 4xx: the same request will be refused again. `problem.code` is for programs."""

    def __init__(self, problem: ProblemDetails) -> None:
        self.problem = problem
        super().__init__(problem.detail or problem.title)


class ConsoleClient:
    """Not for sharing between threads: make one per thread.

    url: one address or several; the one that answered last is asked first. token: sent as a bearer token,
    never logged, never in the address. timeout: seconds to wait for an answer. known: the console has taken the token,
    and known the job, before. issued: the token that it has given out for the job that was created here; None where it
    has none. lead: of a launcher that leads several nodes, its term and node (agent.coordination.lead); deposed:
    called, with a sentence, whenever the console says that another leads since.
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
        # A console on this machine must not be looked for behind a proxy.
        self._session.trust_env = False
        self.issued: str | None = None
        self.token = token
        if token:
            self._session.headers["Authorization"] = f"Bearer {token}"
        self._deposed = deposed
        if lead is not None:
            self._session.headers[LEAD] = lead

    @property
    def url(self) -> str:
        """The address that is asked first."""
        return self._urls[self._at]

    def post(self, path: str, message: Message, reply: type[M] | None = None, *, key: str | None = None) -> M | None:
        """POSTs `message`; returns the answer as `reply`. key: an idempotency key.

        Raises ConsoleUnavailable or ConsoleRefused.
        """
        headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
        return self._call("POST", path, reply, data=message.model_dump_json().encode(), headers=headers)

    def get(self, path: str, reply: type[M], *, wait: float = 0.0, **params: int | str) -> M | None:
        """GETs `path`; None on 204. wait: seconds the console may hold the answer back (long-poll)."""
        if len(self._urls) > 1:
            wait = min(wait, SHORT_POLL_SECONDS)
        query: dict[str, str | float] = {**params} | ({"wait": wait} if wait else {})
        return self._call("GET", path, reply, params=query, extra_time=wait)

    def _call(
        self,
        method: str,
        path: str,
        reply: type[M] | None,
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
            return read_model(reply, answer.content)
        except ValidationError:
            raise ConsoleUnavailable(f"{self.url}{API}{path} answered something else than {reply.__name__}") from None

    def _ask(self, method: str, path: str, extra_time: float, body: dict[str, Any]) -> requests.Response:
        """Of the first address that takes the request. Raises ConsoleUnavailable where none does."""
        reasons, first, kind = [], self._at, ConsoleUnavailable
        for turn in range(len(self._urls)):
            at = (first + turn) % len(self._urls)
            url = self._urls[at]
            try:
                timeouts = (min(CONNECT_SECONDS, self._current_timeout), self._current_timeout + extra_time)
                answer = self._session.request(method, f"{url}{API}{path}", timeout=timeouts, **body)
            except requests.RequestException as error:
                reasons.append(f"{url} does not answer ({type(error).__name__})")
                continue
            self._at = at  # also one that is a standby: the other may hang, and would be waited for again
            # Of a 4xx the console says why. One without that is a proxy's, while there is no console behind it.
            code = _problem(answer).code if 400 <= answer.status_code < 500 else "unknown"
            refused = code != "unknown"
            # Too slow (this process was suspended), too many; and a token that was good is no reason to end a job.
            later = answer.status_code in (408, 429) or (answer.status_code == 401 and self._known)
            if code == "unknown_job" and self._known:
                later, kind = True, JobUnknown
            if answer.status_code < 400 or (refused and not later):
                self._current_timeout = self._first_timeout()
                return answer
            reasons.append(f"{url} answered {answer.status_code}{_detail(answer)}")
        # One that is only slow is given more time.
        self._current_timeout = min(2 * self._current_timeout, self._timeout)
        raise kind("; ".join(reasons))

    def _first_timeout(self) -> float:
        """A console that hangs must not keep this one from its standby."""
        return self._timeout if len(self._urls) == 1 else min(FIRST_TIMEOUT_SECONDS, self._timeout)


class Backoff:
    """Seconds to wait before the next try: doubling with jitter up to `longest`; `reset` after success."""

    def __init__(self, first: float = 0.2, longest: float = 5.0) -> None:
        self._first, self._longest, self._next = first, longest, first

    def seconds(self) -> float:
        wait, self._next = self._next, min(2 * self._next, self._longest)
        return wait * random.uniform(0.5, 1.0)

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
    return f" ({problem.detail[:300]})" if problem.code != "unknown" else ""


# -- one time axis for processes of several hosts ----------------------------------------------------

# Processes of a host share its monotonic clock, so their times compare as they are. Clocks of
# different hosts are compared with the console's: half of the shortest of a few round trips bounds the
# error, whatever the network did in between.

ROUND_TRIPS = 8


@dataclass(frozen=True)
class Offset:
    """microseconds: to be added to this clock's times to get the console's; within ± uncertainty."""

    microseconds: int
    uncertainty: int


def offset_to_console(client: ConsoleClient) -> Offset:
    """Raises ConsoleUnavailable or ConsoleRefused."""

    def ask() -> ClockReading:
        reading = client.get("/clock", ClockReading)
        assert reading is not None
        return reading

    return measure_offset(ask)


def measure_offset(ask: Callable[[], ClockReading], now: Callable[[], int] = time.monotonic_ns) -> Offset:
    """ask: reads the console's clock; now: this one, in nanoseconds."""
    best: Offset | None = None
    for _ in range(ROUND_TRIPS):
        sent = now()
        reading = ask()
        received = now()
        if reading.name == clock_name():
            return Offset(0, 0)
        # Rounded up: the reading itself is cut to whole microseconds.
        uncertainty = (received - sent) // 2000 + 2
        if best is None or uncertainty < best.uncertainty:
            best = Offset(reading.microseconds - (sent + received) // 2000, uncertainty)
    assert best is not None
    return best
