"""HTTP session with the console: token, time-outs, back-off, and errors that say what happened."""

from __future__ import annotations

import random
from typing import TypeVar

import requests
from pydantic import BaseModel, ValidationError

from agent.protocol import API, Message, Problem
from planner.errors import InputError

M = TypeVar("M", bound=BaseModel)


class ConsoleUnavailable(Exception):
    """No answer, or a 5xx: worth another try later."""


class ConsoleRefused(Exception):
    """A 4xx: the same request will be refused again. `problem.code` is for programs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.detail or problem.title)


def check_url(url: str, *, field: str = "--console") -> str:
    """`url` without a trailing slash; raises InputError unless it is http(s)://host[:port]."""
    if not url.startswith(("http://", "https://")) or len(url.split("/")) < 3 or not url.split("/")[2]:
        raise InputError(field, url, "an address such as http://127.0.0.1:8501")
    return url.rstrip("/")


class ConsoleClient:
    """Not for sharing between threads: make one per thread.

    token: sent as a bearer token, never logged, never in the address.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 10.0) -> None:
        self.url = check_url(url)
        self._timeout = timeout
        self._session = requests.Session()
        # A console on this machine must not be looked for behind a proxy.
        self._session.trust_env = False
        if token:
            self._session.headers["Authorization"] = f"Bearer {token}"

    def post(self, path: str, message: Message, reply: type[M] | None = None, *, key: str | None = None) -> M | None:
        """POSTs `message`; returns the answer as `reply`. key: an idempotency key.

        Raises ConsoleUnavailable or ConsoleRefused.
        """
        headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
        return self._call("POST", path, reply, data=message.model_dump_json().encode(), headers=headers)

    def get(self, path: str, reply: type[M], *, wait: float = 0.0, **params: int | str) -> M | None:
        """GETs `path`; None on 204. wait: seconds the console may hold the answer back (long-poll)."""
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
        try:
            answer = self._session.request(
                method,
                f"{self.url}{API}{path}",
                data=data,
                headers=headers,
                params=params,
                timeout=(5.0, self._timeout + extra_time),
            )
        except requests.RequestException as error:
            raise ConsoleUnavailable(f"{self.url} does not answer ({type(error).__name__})") from None
        if answer.status_code >= 500:
            raise ConsoleUnavailable(f"{self.url} answered {answer.status_code}")
        if answer.status_code >= 400:
            raise ConsoleRefused(_problem(answer))
        if reply is None or answer.status_code == 204:
            return None
        try:
            return reply.model_validate_json(answer.content)
        except ValidationError:
            raise ConsoleUnavailable(f"{self.url}{API}{path} answered something else than {reply.__name__}") from None


class Backoff:
    """Seconds to wait before the next try: doubling with jitter up to `longest`; `reset` after success."""

    def __init__(self, first: float = 0.2, longest: float = 5.0) -> None:
        self._first, self._longest, self._next = first, longest, first

    def seconds(self) -> float:
        wait, self._next = self._next, min(2 * self._next, self._longest)
        return wait * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next = self._first


def _problem(answer: requests.Response) -> Problem:
    try:
        return Problem.model_validate_json(answer.content)
    except ValidationError:
        text = answer.text[:200]
        return Problem(title=answer.reason or "refused", status=answer.status_code, code="unknown", detail=text)
