"""What was seen of jobs, on both kinds of database."""

from __future__ import annotations

from typing import Any

import pytest

from openrecycle.db.access import AuditStore
from openrecycle.db.store import JobUpdate, Store

JOB = {"name": "job", "spec": "{}", "state": "running", "created_at": 1.0, "workers": []}


@pytest.fixture(autouse=True)
def _two_jobs(store: Store) -> None:
    for job_id in ("a", "b"):
        store.create_job(job_id, **JOB)  # type: ignore[arg-type]


def test_the_newest_measured_iteration_of_each_job_is_kept(store: Store) -> None:
    assert store.measured("a") is None
    store.put_measured("a", 3, '{"iteration": 3}', 10.0)
    store.put_measured("b", 9, '{"iteration": 9}', 11.0)
    store.put_measured("a", 4, '{"iteration": 4}', 12.0)
    assert (store.measured("a"), store.measured("b")) == ('{"iteration": 4}', '{"iteration": 9}')
    assert store.measured("a", 3) is None


def test_measured_iterations_that_links_name_stay(store: Store) -> None:
    for iteration, keep in ((3, ()), (5, (3,)), (8, (3,)), (5, (3, 8)), (9, (3, 5))):
        store.put_measured("a", iteration, f'{{"iteration": {iteration}}}', float(iteration), keep=keep)
    assert store.measured_iterations("a") == [3, 5, 9]
    assert store.measured("a", 3) == '{"iteration": 3}' and store.measured("a", 8) is None
    assert store.measured("a") == '{"iteration": 9}'
    assert store.measured_iterations("b") == []


def test_states_of_a_worker_in_their_order(store: Store) -> None:
    for at, state in enumerate(("starting", "running", "suspect", "failed")):
        rows = [{"worker": worker, "state": state, "at": float(at)} for worker in ("W0_0", "W0_1")]
        store.apply("a", JobUpdate(job={"state": "running"}, states=rows))
    assert [(row["state"], row["at"]) for row in store.worker_states("a", "W0_1")] == [
        ("starting", 0.0),
        ("running", 1.0),
        ("suspect", 2.0),
        ("failed", 3.0),
    ]
    assert [row["state"] for row in store.worker_states("a", "W0_1", limit=2)] == ["suspect", "failed"]
    assert store.worker_states("b", "W0_1") == []


def event(seq: int, worker: str | None = None) -> dict[str, object]:
    return {
        "seq": seq,
        "at": float(seq),
        "severity": "error",
        "kind": "failure",
        "worker": worker,
        "text": f"no. {seq}",
    }


def test_events_are_seen_once_and_by_whoever_saw_them_first(store: Store) -> None:
    store.apply("a", JobUpdate(events=[event(1), event(2, "W0_1"), event(3)]))
    assert store.see_events("a", [1, 2, 77], "Ann") == 2, "the job has no event 77"
    assert store.see_events("a", [2, 3], "Bob") == 1
    assert store.see_events("a", [], "Bob") == 0
    found = store.seen_events("a", [1, 2, 3, 77])
    assert {seq: actor for seq, (actor, _) in found.items()} == {1: "Ann", 2: "Ann", 3: "Bob"}
    assert store.seen_events("b", [1]) == {}
    audit = AuditStore(store.database).read(job_id="a")
    assert [(row["actor"], row["action"], row["detail"]) for row in audit] == [
        ("Ann", "acknowledge", "1, 2"),
        ("Bob", "acknowledge", "3"),
    ]
    assert [row["seq"] for row in store.events_of("a", "W0_1")] == [2]


def test_sums_of_iterations_by_generation(store: Store) -> None:
    def row(iteration: int, seconds: float, generation: int, living: int, *skipped: int) -> dict[str, object]:
        return {
            "skipped": skipped,
            "iteration": iteration,
            "loss": 1.0,
            "loss_hex": (1.0).hex(),
            "seconds": seconds,
            "generation": generation,
            "living": living,
            "committed_at": 1.0,
        }

    store.add_iterations("a", [row(0, 9.0, 1, 4), row(1, 1.0, 1, 4), row(2, 1.5, 1, 4), row(3, 5.0, 2, 3)])
    store.add_iterations("a", [row(4, 2.0, 2, 3, 17, 3), row(5, 7.0, 3, 4, 0), row(6, 1.25, 3, 4)])
    sums = store.iteration_sums("a", 5)
    assert [
        tuple(s[k] for k in ("generation", "living", "count", "seconds", "first", "first_seconds")) for s in sums
    ] == [
        (1, 4, 3, 11.5, 0, 9.0),
        (2, 3, 2, 7.0, 3, 5.0),
        (3, 4, 1, 7.0, 5, 7.0),
    ]
    assert [s["skipped"] for s in sums] == [0, 2, 1]
    assert store.committed_after("a", 2.0) is None
    assert store.committed_after("a", 1.0) == {"iteration": 0, "generation": 1, "seconds": 9.0, "committed_at": 1.0}
    assert store.iteration_sums("b", 5) == []
    assert store.last_commit("b") == 0
    store.add_iterations("b", [row(n, 1.0, 1, 4) | {"committed_at": 10.0 + n} for n in range(3)])
    assert store.last_commit("b") == 12.0 and store.last_commit("b", 2) == 11.0 and store.last_commit("b", 0) == 0


def test_the_iteration_after_a_wait_is_found_without_a_look_at_all_of_them(store: Store) -> None:
    usual = {"loss": 1.0, "loss_hex": (1.0).hex(), "seconds": 1.0, "generation": 1, "living": 4, "skipped": ()}
    numbers = [n for n in range(5_000) if n % 7]  # those of a file from elsewhere may have gaps
    store.add_iterations("a", [{**usual, "iteration": n, "committed_at": 10.0 + n} for n in numbers])
    looked_at_many: list[None] = []
    if store.database.is_sqlite:
        with store.database.engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(lambda: looked_at_many.append(None), 10_000)  # steps of its machine
    for at, number in ((0.0, 1), (11.0, 1), (11.5, 2), (16.5, 8), (17.0, 8), (4_000.5, 3_991), (5_009.0, 4_999)):
        found = store.committed_after("a", at)
        assert found is not None and found["iteration"] == number, at
    assert store.committed_after("a", 5_009.5) is None
    assert store.committed_after("b", 0.0) is None
    assert not looked_at_many


def test_of_recoveries_those_since_a_generation_and_the_latest_are_read(store: Store) -> None:
    """A job of some weeks has thousands, and its page asks each second."""
    took = {"detected_ms": 1.0, "unblocked_ms": 2.0, "reformed_ms": 3.0, "resumed_ms": 4.0, "death_known": True}
    for generation, at in ((2, 10.0), (3, 20.0), (4, 40.0), (5, 30.0)):  # of a clock that was put back
        assert store.add_recovery("a", {**took, "worker": "W0_0", "generation": generation, "at": at})

    def read(after: int) -> list[int]:
        return [row["generation"] for row in store.recoveries("a", after=after)]

    assert read(0) == [2, 3, 5, 4]
    assert read(3) == [5, 4] and read(4) == [5, 4] and read(9) == [4]
    assert store.recoveries("b", after=3) == []
