from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from openrecycle.db.access import AuditStore
from openrecycle.db.job_rows import JobRows
from openrecycle.db.store import JobUpdate, Store

WORKERS = [{"name": f"W{p}_{s}", "state": "starting"} for p in range(2) for s in range(2)]


def make_job(store: Store, job_id: str = "job", key: str | None = None) -> dict[str, Any]:
    return store.create_job(
        job_id, name="n", spec="{}", state="starting", created_at=1.5, workers=WORKERS, idempotency_key=key
    )


def event(seq: int, text: str = "t") -> dict[str, Any]:
    return {"seq": seq, "at": 1.0, "severity": "info", "kind": "job", "worker": None, "text": text}


def generation(number: int, fingerprint: str = "f") -> dict[str, Any]:
    return {
        "generation": number,
        "plan_fingerprint": fingerprint,
        "living": ("W0_0", "W1_0"),
        "failed": ("W0_1",),
        "joining": (),
        "reason": "why",
        "opened_at": 2.0,
    }


def iteration(number: int, loss: float = 0.5) -> dict[str, Any]:
    return {
        "iteration": number,
        "loss": loss,
        "loss_hex": loss.hex(),
        "seconds": 0.25,
        "generation": 1,
        "living": 4,
        "committed_at": 3.0,
    }


def test_a_job_that_is_being_deleted_has_no_key(store: Store) -> None:
    make_job(store, "a", key="k")
    found = store.job_of_key("k")
    assert found is not None and found["id"] == "a" and store.job_of_key("another") is None
    audit = {"at": 1.0, "actor": "Ann", "action": "delete", "job_id": "a", "target": "a", "detail": ""}
    assert JobRows(store.database).hide("a", audit)
    assert store.job_of_key("k") is None
    assert make_job(store, "b", key="k")["id"] == "b"


def test_a_plan_that_is_made_while_its_job_is_deleted_is_not_stored(store: Store) -> None:
    """It is no fault, and leaves nothing behind."""
    make_job(store)
    rows, audit = JobRows(store.database), {"at": 1.0, "actor": "Ann", "action": "delete", "job_id": "job"}
    hidden = rows.hide("job", audit | {"target": "job", "detail": ""})
    assert hidden and not store.put_plan("job", "f", b"{}", [], True)
    while rows.delete_some(hidden):
        pass
    assert not store.put_plan("job", "f", b"{}", [], True)
    assert store.plan("f") is None


def test_a_job_starts_with_its_workers(store: Store) -> None:
    make_job(store)
    assert [row["id"] for row in store.jobs()] == ["job"]
    assert sorted(row["name"] for row in store.workers("job")) == ["W0_0", "W0_1", "W1_0", "W1_1"]


def test_a_key_used_before_gives_the_earlier_job(store: Store) -> None:
    make_job(store, "one", key="k")
    assert make_job(store, "two", key="k")["id"] == "one"
    assert [row["id"] for row in store.jobs()] == ["one"]
    make_job(store, "three")
    make_job(store, "four")
    assert len(store.jobs()) == 3


def test_a_change_is_stored_as_a_whole(store: Store) -> None:
    make_job(store)
    change = JobUpdate(
        job={"state": "running"},
        workers=[{"name": "W0_0", "state": "running", "incarnation": "a"}, {"name": "W0_1", "state": "failed"}],
        plan=("f", b'{"plan": 1}', ["W0_1"], False),
        generation=generation(1),
        events=[event(1), event(2)],
        acknowledgements=[
            {"worker": "W0_0", "incarnation": "a", "generation": 1, "state": "adopted", "iteration": 0, "at": 1.0}
        ],
    )
    store.apply("job", change)
    assert store.jobs()[0]["state"] == "running"
    workers = {row["name"]: row for row in store.workers("job")}
    assert (workers["W0_0"]["state"], workers["W0_0"]["incarnation"]) == ("running", "a")
    assert (workers["W0_1"]["state"], workers["W1_0"]["state"]) == ("failed", "starting")
    assert store.generations("job")[0]["living"] == ["W0_0", "W1_0"]
    assert store.plan("f") == b'{"plan": 1}'
    assert [row["seq"] for row in store.events("job")] == [1, 2]
    assert store.acknowledgements("job", 1)[0]["state"] == "adopted"


def test_generations_come_page_by_page_with_their_acknowledgements(store: Store) -> None:
    make_job(store)
    for number in (1, 2, 3, 4):
        ack = {
            "worker": "W0_0",
            "incarnation": "a",
            "generation": number,
            "state": "adopted",
            "iteration": 0,
            "at": 1.0,
        }
        later = [{**ack, "worker": "W1_0", "at": 1.5}, {**ack, "state": "formed", "at": 2.0}] if number == 4 else []
        plan = ("f", b"{}", [], False) if number == 1 else None
        store.apply("job", JobUpdate(plan=plan, generation=generation(number), acknowledgements=[ack, *later]))
    assert [(row["generation"], row["state"], row["at"]) for row in store.last_acknowledgements("job")] == [
        (1, "adopted", 1.0),
        (2, "adopted", 1.0),
        (3, "adopted", 1.0),
        (4, "adopted", 1.5),
        (4, "formed", 2.0),
    ]
    assert [row["generation"] for row in store.generations("job", after=1, limit=2)] == [2, 3]
    assert [row["generation"] for row in store.acknowledgements("job", after=1, last=3)] == [2, 3]
    rows = store.generations("job")
    assert [row["generation"] for row in rows] == [1, 2, 3, 4]
    assert store.all_generations("job") == [{k: v for k, v in row.items() if k != "living"} for row in rows]


def test_a_change_that_fails_leaves_nothing(store: Store) -> None:
    make_job(store)
    store.apply("job", JobUpdate(events=[event(1)]))
    with pytest.raises(IntegrityError):
        store.apply("job", JobUpdate(job={"state": "halted"}, events=[event(1, "twice")]))
    assert store.jobs()[0]["state"] == "starting"
    assert [row["text"] for row in store.events("job")] == ["t"]


def test_a_generation_needs_its_plan(store: Store) -> None:
    make_job(store)
    with pytest.raises(IntegrityError):
        store.apply("job", JobUpdate(generation=generation(1, "nowhere")))


def test_a_plan_is_stored_once_for_all_jobs(store: Store) -> None:
    make_job(store, "one")
    make_job(store, "two")
    data = b"x" * 100_000
    for job in ("one", "two", "one"):
        store.put_plan(job, "f", data, ["W0_1"], True)
    assert store.plan("f") == data
    assert [row["failed"] for row in store.job_plans("one")] == [["W0_1"]]
    assert store.job_plans("two")[0]["ahead"] is True
    assert store.plan("g") is None


def test_plans_come_with_the_fewest_failures_first(store: Store) -> None:
    make_job(store)
    store.put_plan("job", "two", b"{}", ["W0_0", "W0_1"], True)
    store.put_plan("job", "none", b"{}", [], True)
    store.put_plan("job", "one", b"{}", ["W1_1"], True)
    assert [row["fingerprint"] for row in store.job_plans("job")] == ["none", "one", "two"]


def test_heartbeats_of_many_jobs_are_written_together(store: Store) -> None:
    make_job(store, "one")
    make_job(store, "two")
    beat = {"seq": 7, "generation": 1, "iteration": 9, "phase": "training", "heard_at": 5.0}
    store.heartbeats({"one": [{"name": "W0_0", **beat}], "two": [{"name": "W1_1", **beat}, {"name": "W0_0", **beat}]})
    assert {row["name"] for row in store.workers("two") if row["seq"] == 7} == {"W1_1", "W0_0"}
    assert [row["iteration"] for row in store.workers("one") if row["name"] == "W0_0"] == [9]


def test_the_first_report_of_an_iteration_counts(store: Store) -> None:
    make_job(store)
    store.add_iterations("job", [iteration(0, 0.5), iteration(1, 0.1)])
    store.add_iterations("job", [iteration(1, 0.9), iteration(2, 0.3)])
    store.add_iterations("job", [])
    rows = store.iterations("job")
    assert [(r["iteration"], r["loss"]) for r in rows] == [(0, 0.5), (1, 0.1), (2, 0.3)]
    assert all(float.fromhex(r["loss_hex"]) == r["loss"] for r in rows)
    assert store.committed_iterations("job") == 3
    assert store.committed_iterations("none") == 0


def test_iterations_are_read_on_from_where_one_was(store: Store) -> None:
    make_job(store)
    store.add_iterations("job", [iteration(i) for i in range(10)])
    assert [r["iteration"] for r in store.iterations("job", after=6)] == [7, 8, 9]
    assert [r["iteration"] for r in store.iterations("job", limit=2)] == [0, 1]
    assert [r["iteration"] for r in store.iterations("job", limit=2, newest=True)] == [8, 9]


def test_events_are_read_on_from_where_one_was(store: Store) -> None:
    make_job(store)
    store.apply("job", JobUpdate(events=[event(i) for i in range(1, 8)]))
    assert [r["seq"] for r in store.events("job", after=5)] == [6, 7]
    assert [r["seq"] for r in store.events("job", limit=3, newest=True)] == [7, 6, 5]
    assert store.last_event("job") == 7
    assert store.last_event("none") == 0


def test_a_recovery_is_reported_once(store: Store) -> None:
    make_job(store)
    row = {"detected_ms": 1.0, "unblocked_ms": 2.0, "reformed_ms": 3.0, "resumed_ms": 4.0, "at": 5.0}
    assert store.add_recovery("job", {"worker": "W0_1", "generation": 2, **row}) is True
    assert store.add_recovery("job", {"worker": "W0_1", "generation": 2, **row, "at": 6.0}) is False
    assert [(r["worker"], r["resumed_ms"], r["at"], r["death_known"]) for r in store.recoveries("job")] == [
        ("W0_1", 4.0, 5.0, True)
    ]


def test_commands_are_numbered_and_audited(store: Store) -> None:
    make_job(store)
    one = store.add_command("job", kind="kill", worker="W0_1", actor="ada", events=[event(1)])
    two = store.add_command("job", kind="restart", worker="W0_1", actor="bob", events=[])
    assert (one, two) == (1, 2)
    assert [(r["seq"], r["kind"]) for r in store.commands("job")] == [(1, "kill"), (2, "restart")]
    assert [(r["actor"], r["action"], r["target"]) for r in AuditStore(store.database).read(job_id="job")] == [
        ("ada", "kill", "W0_1"),
        ("bob", "restart", "W0_1"),
    ]
    assert len(store.events("job")) == 1


def test_operators_who_ask_at_once_get_different_numbers(store: Store) -> None:
    make_job(store)
    numbers: list[int] = []
    start = threading.Barrier(6)

    def ask() -> None:
        start.wait()
        numbers.append(store.add_command("job", kind="kill", worker="W0_0", actor="x", events=[]))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6]


def test_writers_in_many_threads_wait_for_each_other(store: Store) -> None:
    make_job(store)
    errors: list[BaseException] = []

    def write(part: int) -> None:
        try:
            for i in range(20):
                store.add_iterations("job", [iteration(100 * part + i)])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len(store.iterations("job")) == 80


def test_those_who_write_the_same_workers_wait_for_each_other(store: Store) -> None:
    """Whatever order each has them in, and whatever columns."""
    names = [f"W{i}_0" for i in range(60)]
    workers = [{"name": name, "state": "starting"} for name in names]
    store.create_job("job", name="n", spec="{}", state="starting", created_at=1.0, workers=workers)
    beats = [{"name": name, "seq": 1, "heard_at": 2.0} for name in reversed(names)]
    members = [{"name": n, "state": "running", **({"detail": "d"} if i % 2 else {})} for i, n in enumerate(names)]
    together, errors = threading.Barrier(2), list[Exception]()

    def write(once: Callable[[], None]) -> None:
        try:
            for _ in range(20):
                together.wait(60)
                once()
        except Exception as error:
            errors.append(error)
            together.abort()

    threads = [
        threading.Thread(target=write, args=(lambda: store.heartbeats({"job": beats}),)),
        threading.Thread(target=write, args=(lambda: store.apply("job", JobUpdate(workers=members)),)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    rows = {row["name"]: row for row in store.workers("job")}
    assert {(row["state"], row["seq"], row["heard_at"]) for row in rows.values()} == {("running", 1, 2.0)}
    assert [rows[name]["detail"] for name in names[:4]] == ["", "d", "", "d"]
