"""Profiles under a name, on both kinds of database."""

from __future__ import annotations

from openrecycle.db.plan_rows import Profiles
from openrecycle.db.session import Database

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


def test_one_is_replaced_only_as_it_was_seen(database: Database) -> None:
    profiles = Profiles(database)

    def saved(text: str, seen: float | None) -> bool:
        return profiles.put_over("c", text, SUMMARY, "ada", updated_at=seen)

    assert saved("1", None) and not saved("2", None), "another has the name"
    (first,) = profiles.all()
    assert saved("3", first["updated_at"])
    assert not saved("4", first["updated_at"] - 1), "it is another one by now"
    found = profiles.get("c")
    assert found is not None and found[1] == "3" and found[0]["created_at"] == first["created_at"]
    profiles.delete("c")
    assert not saved("5", found[0]["updated_at"]) and profiles.get("c") is None
