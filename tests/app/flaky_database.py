"""A real database whose transactions fail when a test says so: before, during and after their commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from openrecycle.db.session import Database

Fault = Literal["refused", "rolled back", "answer lost"]
FAULTS: tuple[Fault, ...] = ("refused", "rolled back", "answer lost")


class FlakyDatabase(Database):
    """fault: what becomes of writes once `healthy` more have succeeded; None: nothing goes wrong.

    refused: the transaction does not begin, as without a server. rolled back: it fails at its end, as on a full
    disk. answer lost: it is committed, and the caller is told that it failed. away: nothing can be read either.
    """

    fault: Fault | None = None
    healthy = 0
    away = False

    @contextmanager
    def read(self) -> Iterator[Session]:
        if self.away:
            raise _failure("away")
        with super().read() as session:
            yield session

    @contextmanager
    def write(self, *, lasting: bool = True) -> Iterator[Session]:
        fault = self._next()
        if fault == "refused":
            raise _failure(fault)
        with super().write(lasting=lasting) as session:
            yield session
            if fault == "rolled back":
                raise _failure(fault)
        if fault == "answer lost":
            raise _failure(fault)

    def heal(self) -> None:
        self.fault, self.healthy, self.away = None, 0, False

    def _next(self) -> Fault | None:
        if self.fault is None:
            return "refused" if self.away else None
        if self.healthy:
            self.healthy -= 1
            return None
        return self.fault


def _failure(why: str) -> OperationalError:
    return OperationalError("a statement", {}, RuntimeError(why))
