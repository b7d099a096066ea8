"""What is read of jobs without reading each, on both kinds of database."""

from __future__ import annotations

from openrecycle.db.store import JobUpdate, Store


def generation(number: int, living: list[str]) -> JobUpdate:
    row = {"generation": number, "plan_fingerprint": "f", "living": living, "failed": [], "joining": [], "reason": "r"}
    return JobUpdate(plan=("f", b"{}", [], False), generation={**row, "moves": [], "restore": False, "opened_at": 1.0})


def test_states_and_a_line_of_each_that_is_over(store: Store) -> None:
    states = {"c": "running", "a": "finished", "d": "stopped", "b": "finished", "gone": "deleting", "new": "importing"}
    for at, (job_id, state) in enumerate(states.items()):
        store.create_job(job_id, name=f"job {job_id}", spec="{}", state=state, created_at=float(at), workers=[])
    for number, living in ((9, ["W0_0"]), (10, ["W0_0", "W0_1", "W1_0"])):
        store.apply("a", generation(number, living))
    store.apply("d", generation(1, []))
    assert list(store.job_states().items()) == [
        ("c", "running"),
        ("a", "finished"),
        ("d", "stopped"),
        ("b", "finished"),
    ]
    lines = [(row["id"], row["name"], row["state"], row["generation"], row["living"]) for row in store.jobs_over()]
    assert lines == [
        ("a", "job a", "finished", 10, 3),
        ("d", "job d", "stopped", 1, 0),
        ("b", "job b", "finished", 0, 0),
    ]
    assert [row["id"] for row in store.jobs_over(["b", "c", "a"])] == ["a", "b"]
    assert store.newest_generation("a")["generation"] == 10 and store.newest_generation("b") is None  # type: ignore[index]
    assert store.job("gone") is None and store.job("a") == store.jobs()[1]
