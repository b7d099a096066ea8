"""What rows of before say in sentences alone is read once, into columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, text

from openrecycle.db import later_columns
from openrecycle.db.later_columns import GenerationsOfBefore, worker_of_before
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from tests.db.test_job_index import generation

STOOD_BY = "stands by for W1_0, W1_2 (stand by)"
# Details as older versions wrote them, and why the worker was let go.
OF_BEFORE: dict[str, list[Any] | None] = {
    "its process was killed by SIGKILL": None,
    "asked to leave by Ann": ["Ann", False, []],
    STOOD_BY: ["", True, ["W1_0", "W1_2"]],
    "": None,
}


def process(role: str, since: float, ended: str = "", detail: str = "", *, slot: str = "") -> dict[str, Any]:
    """slot: where it was before it held the role."""
    held = [[slot, 0.0]] if slot else []
    told = {"detail": detail} if detail else {}  # as it is stored: without what is as usual
    return {"incarnation": f"{role}-{since:g}", "held": [*held, [role, since]], "ended": ended} | told


def row(reason: str, failed: list[str], joining: list[str] | None = None, **others: Any) -> dict[str, Any]:
    lists = {"failed": failed, "joining": joining or [], "moves": []} | others
    return {"reason": reason, "opened_at": 9.0} | {name: json.dumps(value) for name, value in lists.items()}


def lost(*rows: dict[str, Any]) -> list[list[str]]:
    past = GenerationsOfBefore(())
    return [json.loads(past.read(each)["lost"]) for each in rows]


def test_whoever_is_out_or_joins_anew_was_lost() -> None:
    rows = [
        row("all have registered", []),
        row("W1_2: silent", ["W1_2"]),
        row("W1_2 re-joins", [], ["W1_2"]),
        row("W0_0: silent; W0_0 re-joins", [], ["W0_0"]),
        row("Ann asked W0_1 to leave", ["W0_1"]),
        row("W1_2: silent; ...", ["W0_1", "W2_2"], ["W1_2"], moves=[["W2_2", "W1_2"]]),
        row("W1_2 was started anew", ["W0_1", "W2_2"], ["W1_2"]),
        row("iteration 7 raised in W0_0", ["W0_1", "W2_2"], ["W1_2"]),
        row("stage 0: parts are gone", ["W0_1", "W2_2"], ["W0_0", "W1_0", "W1_2"]),
    ]
    assert lost(*rows) == [[], ["W1_2"], [], ["W0_0"], [], ["W1_2"], ["W1_2"], [], []]


def test_of_many_who_stood_by_their_processes_tell_those_that_the_reason_leaves_out() -> None:
    """A process that came back, or came from elsewhere, and was lost there, is another's matter."""
    processes = [
        process("W1_1", 2.0, "drained", STOOD_BY),
        process("W1_3", 2.0, "drained", STOOD_BY),
        process("W1_4", 2.0, "drained", "asked to leave by Ann"),
        process("W1_5", 2.0, "drained", STOOD_BY),
        process("W1_5", 5.0, "failed", "its process ended", slot="W0_5"),
        process("W1_6", 12.0, "drained", STOOD_BY),
        process("W1_7", 2.0, "drained"),
    ]
    past = GenerationsOfBefore(processes)
    past.read(row("W1_0: silent", ["W1_0"]))
    read = past.read(row("W1_1 and 5 more are to stand by", [f"W1_{s}" for s in (0, 1, 3, 4, 5, 6, 7)]))
    assert json.loads(read["let_go"]) == [["W1_1", True], ["W1_3", True], ["W1_4", False], ["W1_7", False]]
    assert json.loads(read["lost"]) == ["W1_5", "W1_6"]


@pytest.mark.parametrize(("detail", "let_go"), OF_BEFORE.items())
def test_why_a_worker_was_let_go_stood_in_its_detail(detail: str, let_go: list[Any] | None) -> None:
    drained = process("W1_1", 2.0, "drained" if let_go else "failed", detail)
    read = worker_of_before({"detail": detail, "processes": json.dumps([drained])})
    assert json.loads(read["let_go"]) == let_go
    assert [p.get("stands_by", False) for p in json.loads(read["processes"])] == [detail == STOOD_BY]


def test_a_database_of_before_is_filled_in_once(database_url: str) -> None:
    database = Database(database_url)
    database.upgrade()
    store, drained = Store(database), process("W1_1", 0.5, "drained", STOOD_BY)
    workers = [{"name": f"W1_{s}", "state": "failed", "detail": STOOD_BY if s == 1 else "silent"} for s in range(3)]
    reasons = {"j": "halted: no worker has been heard for 1 h.", "k": "halted: there is no plan"}
    for job_id, reason in reasons.items():
        store.create_job(job_id, name=job_id, spec="{}", state="halted", created_at=0.0, workers=workers)
        with database.engine.begin() as connection:
            connection.execute(text("update job set reason = :reason where id = :id"), {"reason": reason, "id": job_id})
    for number, failed in enumerate(([], ["W1_0"], ["W1_0", "W1_1", "W1_2"]), 1):
        update = generation(number, ["W0_0"])
        assert update.generation is not None
        update.generation.update(reason="W1_0 and 1 more are to stand by", failed=failed, let_go=[])
        store.apply("j", update)
    with database.engine.begin() as connection:
        told = {"processes": json.dumps([drained])}
        connection.execute(text("update worker set processes = :processes where name = 'W1_1'"), told)
        for column in ("job drop column unheard", "worker drop column let_go", "generation drop column lost"):
            connection.execute(text(f"alter table {column}"))
    database.upgrade()
    assert {job["id"]: bool(job["unheard"]) for job in store.jobs()} == {"j": True, "k": False}
    assert {w["name"]: json.loads(w["let_go"]) for w in store.workers("j")} == {
        "W1_0": None,
        "W1_1": ["", True, ["W1_0", "W1_2"]],
        "W1_2": None,
    }
    assert json.loads(store.workers("j")[1]["processes"])[0]["stands_by"] is True
    told_of = [(row["let_go"], row["lost"]) for row in store.all_generations("j")]
    assert told_of == [([], []), ([["W1_0", True]], []), ([["W1_0", True], ["W1_1", True]], ["W1_2"])]
    with database.engine.begin() as connection:
        connection.execute(text("update generation set let_go = '[]', lost = '[]'"))
        connection.execute(text("update worker set let_go = 'null'"))
    database.upgrade()
    assert not any(row["lost"] or row["let_go"] for row in store.all_generations("j")), "reasons are read no more"
    assert {w["let_go"] for w in store.workers("j")} == {"null"}
    database.close()


def test_rows_are_filled_a_few_at_a_time_and_by_whoever_comes_next_where_that_ends(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others write in between. A column has its name when all of it is there."""
    monkeypatch.setattr(later_columns, "BATCH", 2)
    database, other = Database(database_url), Database(database_url)
    database.upgrade()
    store, workers = Store(database), [{"name": f"W0_{s}", "state": "failed", "detail": STOOD_BY} for s in range(5)]
    for job_id in ("j", "k"):
        store.create_job(job_id, name=job_id, spec="{}", state="halted", created_at=0.0, workers=workers)
        for number in range(1, 6):
            update = generation(number, ["W1_0"])
            assert update.generation is not None
            update.generation.update(reason="silent", failed=[f"W0_{s}" for s in range(number - 1)])
            store.apply(job_id, update)
    with database.engine.begin() as connection:
        for column in ("worker drop column let_go", "generation drop column lost"):
            connection.execute(text(f"alter table {column}"))
    with database.engine.begin() as connection:
        missing, _ = later_columns.compared(connection)
        later_columns.add(connection, missing)
    done = 0

    @contextmanager
    def begin() -> Iterator[Connection]:
        nonlocal done
        if done == ends_after:
            raise KeyboardInterrupt
        with other.engine.begin() as connection:
            if not other.is_sqlite:
                connection.execute(text("set local lock_timeout = 100"))
            connection.execute(text("update generation set opened_at = opened_at"))
        done += 1
        with database.engine.begin() as connection:
            yield connection

    ends_after = 9
    with pytest.raises(KeyboardInterrupt):
        later_columns.fill(begin, missing)
    with database.engine.connect() as connection:
        assert later_columns.compared(connection) == (missing, False), "as it was left"
        some = connection.scalars(text("select lost_unfilled from generation order by job_id, generation")).all()
    assert some[1] == '["W0_0"]' and some[-1] == "[]"
    database.upgrade()
    for job_id in ("j", "k"):
        assert [row["lost"] for row in store.all_generations(job_id)] == [[], *([f"W0_{s}"] for s in range(4))]
        assert all(json.loads(worker["let_go"]) for worker in store.workers(job_id))
    for opened in (database, other):
        opened.close()
