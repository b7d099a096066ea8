"""Profiles under a name, on both kinds of database."""

from __future__ import annotations

from db.profiles import Profiles
from db.session import Database

SUMMARY = {"kind": "job", "about": "job of 3 x 4 x 6", "stages": 4}


def test_kept_listed_replaced_and_deleted(database: Database) -> None:
    profiles = Profiles(database)
    assert profiles.put("b", '{"b": 1}', SUMMARY, "ada")
    assert profiles.put("a", '{"a": 1}', SUMMARY, "ada")
    first, second = profiles.all()
    assert (first["name"], second["name"], first["about"]) == ("a", "b", "job of 3 x 4 x 6")
    assert not profiles.put("b", '{"b": 2}', {**SUMMARY, "stages": 5}, "eve")
    found = profiles.get("b")
    assert found is not None
    line, document = found
    assert (document, line["stages"], line["saved_by"]) == ('{"b": 2}', 5, "eve")
    assert line["created_at"] == second["created_at"] and line["updated_at"] >= second["updated_at"]
    assert profiles.delete("b") and not profiles.delete("b")
    assert profiles.get("b") is None and [row["name"] for row in profiles.all()] == ["a"]
