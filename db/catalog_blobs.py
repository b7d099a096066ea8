"""The stored plans of one catalog, for whoever reads them one by one (planner.catalog_store.Blobs)."""

from __future__ import annotations

from sqlalchemy import select

from openrecycle.db.models import CatalogPlanRow
from openrecycle.db.session import Database


class CatalogBlobs:
    """The stored plans of one catalog, each read when it is asked for."""

    def __init__(self, database: Database, fingerprint: str) -> None:
        self._database = database
        self._fingerprint = fingerprint

    def names(self) -> list[str]:
        query = select(CatalogPlanRow.name).where(CatalogPlanRow.fingerprint == self._fingerprint)
        with self._database.read() as session:
            return sorted(session.scalars(query))

    def get(self, name: str) -> bytes | None:
        where = (CatalogPlanRow.fingerprint == self._fingerprint, CatalogPlanRow.name == name)
        with self._database.read() as session:
            return session.scalar(select(CatalogPlanRow.data).where(*where))

    def all(self) -> dict[str, bytes]:
        """Every plan by its name, at once."""
        query = select(CatalogPlanRow.name, CatalogPlanRow.data).where(CatalogPlanRow.fingerprint == self._fingerprint)
        with self._database.read() as session:
            return {row.name: row.data for row in session.execute(query)}
