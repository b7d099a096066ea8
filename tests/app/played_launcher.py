"""A job of a console in this process, whose launcher is played."""

from __future__ import annotations

from pathlib import Path

from openrecycle.agent.messages.protocol import JobSpec
from openrecycle.app.console.service import ConsoleService
from openrecycle.db.session import Database
from openrecycle.db.store import Store


class PlayedJob:
    """job_id: of one that another console has begun in the same database."""

    def __init__(self, path: Path, spec: JobSpec, job_id: str | None = None) -> None:
        self._database = Database(f"sqlite:///{path}")
        self._database.upgrade()
        self.console = ConsoleService(Store(self._database))
        self.id = job_id or self.console.jobs.create(spec)[0].job_id
        self.console.jobs.take_up(self.id)

    def close(self) -> None:
        self.console.close()
        self._database.close()
