from __future__ import annotations

import threading

import numpy as np
import pytest
from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import IntegrityError

from openrecycle.db.heartbeats import GROUP, METRICS, HeartbeatStore, Level, Samples, from_beats, groups
from openrecycle.db.models import HeartbeatRow, JobRow
from openrecycle.db.session import Database
from openrecycle.db.store import Store

HOUR = 1_700_000_000 // 86_400 * 86_400  # a whole day, too


@pytest.fixture
def beats(database: Database, store: Store) -> HeartbeatStore:
    store.create_job("a", name="n", spec="{}", state="running", created_at=1.0, workers=[])
    return HeartbeatStore(database)


def seconds(begin: int, count: int, workers: tuple[int, ...] = (0, 1, 40)) -> Samples:
    """A heartbeat a second: F takes 10 ms and 1 more for each second of the minute; resident: by worker."""
    rows = np.full((count * len(workers), 4 + len(METRICS)), np.nan)
    rows[:, 0] = np.tile(workers, count)
    rows[:, 1] = np.repeat(np.arange(begin, begin + count), len(workers)) + 0.25
    rows[:, 2], rows[:, 3] = 7, 3
    rows[:, 4] = 10 + np.floor(rows[:, 1]) % 60
    rows[:, 9] = 1024 * (1 + rows[:, 0])
    return from_beats(rows)


def add_minutes(beats: HeartbeatStore, begin: int, minutes: int, length: int = 60) -> None:
    for minute in range(minutes):
        beats.add("a", groups(seconds(begin + 60 * minute, length)))


def rows_by_level(database: Database) -> dict[int, int]:
    query = select(HeartbeatRow.level, func.count()).group_by(HeartbeatRow.level)
    with database.read() as session:
        return dict(map(tuple, session.execute(query)))


def test_a_minute_is_read_back_by_worker(beats: HeartbeatStore) -> None:
    assert GROUP == 32, "tests put workers 0 and 1 into one group and 40 into another"
    beats.add("a", groups(seconds(HOUR, 60)))
    found = beats.read("a", Level.SECOND, 1, HOUR + 10, HOUR + 20)
    assert found.at.tolist() == list(range(HOUR + 10, HOUR + 20))
    assert found.mean[:, 0].tolist() == list(range(20, 30))
    assert set(found.mean[:, 5].tolist()) == {2048.0} and np.isnan(found.mean[:, 1]).all()
    minute = beats.read("a", Level.MINUTE, 40, HOUR, HOUR + 60)
    assert (minute.low[0, 0], minute.mean[0, 0], minute.high[0, 0]) == (10, 39.5, 69)
    assert minute.beats.tolist() == [60]
    assert len(beats.read("a", Level.SECOND, 2, HOUR, HOUR + 60)) == 0
    assert len(beats.read("b", Level.SECOND, 1, HOUR, HOUR + 60)) == 0


def test_hours_and_days_become_one_block(beats: HeartbeatStore, database: Database) -> None:
    add_minutes(beats, HOUR, 3, length=4)
    add_minutes(beats, HOUR + 3600, 2, length=4)
    assert beats.spans_to_pack(HOUR + 3600, 99) == [], "the last minutes of an hour may still be on their way"
    before = [beats.read("a", Level.HOUR, w, HOUR, HOUR + 86_400) for w in (0, 40)]
    assert [s.beats.tolist() for s in before] == [[12, 8], [12, 8]], "hours that are not over are there already"
    spans = beats.spans_to_pack(HOUR + 3600 + 120, 99)
    assert [(s.level, s.group, s.begin) for s in spans] == [(Level.MINUTE, 0, HOUR), (Level.MINUTE, 1, HOUR)]
    for span in spans:
        beats.pack(span)
        beats.pack(span)  # done already
    assert rows_by_level(database) == {1: 10, 60: 2 + 4, 3600: 2}
    assert len(beats.spans_to_pack(HOUR + 2 * 86_400, 1)) == 1
    while found := beats.spans_to_pack(HOUR + 2 * 86_400, 1):
        beats.pack(found[0])
    assert rows_by_level(database) == {1: 10, 60: 4, 3600: 2}
    for worker, old in zip((0, 40), before, strict=True):
        new = beats.read("a", Level.HOUR, worker, HOUR, HOUR + 86_400)
        assert new.beats.tolist() == [12, 8] and np.allclose(new.mean, old.mean, rtol=1e-3, equal_nan=True)
        assert beats.read("a", Level.MINUTE, worker, HOUR, HOUR + 7200).beats.tolist() == [4] * 5


def test_a_console_that_was_started_again_within_the_minute(beats: HeartbeatStore) -> None:
    beats.add("a", groups(seconds(HOUR, 20)))
    beats.add("a", groups(seconds(HOUR + 20, 40)))
    for span in beats.spans_to_pack(HOUR + 3720, 9):
        beats.pack(span)
    for level in (Level.MINUTE, Level.HOUR):
        found = beats.read("a", level, 0, HOUR, HOUR + 60)
        assert (found.beats.tolist(), found.low[0, 0], found.high[0, 0]) == ([60], 10, 69)
    # And minutes of an hour that was packed before.
    beats.add("a", groups(seconds(HOUR + 60, 30)))
    for span in beats.spans_to_pack(HOUR + 3720, 9):
        beats.pack(span)
    assert beats.read("a", Level.HOUR, 0, HOUR, HOUR + 60).beats.tolist() == [90]


def test_what_is_old_is_deleted_a_little_at_a_time(beats: HeartbeatStore, database: Database) -> None:
    add_minutes(beats, HOUR, 5, length=3)
    assert beats.expire(Level.SECOND, HOUR + 120, 3) == 3
    assert beats.expire(Level.SECOND, HOUR + 120, 3) == 1
    assert beats.expire(Level.SECOND, HOUR + 120, 3) == 0
    assert rows_by_level(database) == {1: 6, 60: 10}
    assert beats.read("a", Level.SECOND, 0, 0, HOUR + 300).at.min() == HOUR + 120


def test_parts_are_made_into_hours_before_they_go(beats: HeartbeatStore, database: Database) -> None:
    """A console that was away for longer than minutes are kept."""
    add_minutes(beats, HOUR, 2, length=3)
    late = HOUR + 30 * 86_400
    assert beats.expire(Level.MINUTE, late, 99) == 0
    for span in beats.spans_to_pack(late, 99):
        beats.pack(span)
    assert beats.expire(Level.MINUTE, late, 99) == 2
    assert beats.read("a", Level.HOUR, 0, HOUR, HOUR + 3600).beats.tolist() == [6]


def test_a_damaged_block_costs_no_more_than_itself(beats: HeartbeatStore, database: Database) -> None:
    add_minutes(beats, HOUR, 3, length=2)
    with database.write() as session:
        session.execute(update(HeartbeatRow).where(HeartbeatRow.begin == HOUR + 60).values(data=b"\1damaged"))
    assert beats.read("a", Level.SECOND, 0, HOUR, HOUR + 180).beats.sum() == 4
    for span in beats.spans_to_pack(HOUR + 3720, 9):
        beats.pack(span)
    assert beats.read("a", Level.HOUR, 0, HOUR, HOUR + 60).beats.tolist() == [4]


def test_a_job_that_is_gone_takes_its_history_along(beats: HeartbeatStore, database: Database) -> None:
    add_minutes(beats, HOUR, 1, length=2)
    with database.write() as session:
        session.execute(delete(JobRow).where(JobRow.id == "a"))
    assert rows_by_level(database) == {}
    with pytest.raises(IntegrityError):
        beats.add("a", groups(seconds(HOUR, 1)))


def test_packing_twice_at_once_counts_nothing_twice(beats: HeartbeatStore) -> None:
    add_minutes(beats, HOUR, 4, length=2)
    spans = beats.spans_to_pack(HOUR + 3720, 9)
    threads = [threading.Thread(target=lambda: [beats.pack(s) for s in spans]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert beats.read("a", Level.HOUR, 0, HOUR, HOUR + 60).beats.tolist() == [8]
    assert beats.read("a", Level.MINUTE, 0, HOUR, HOUR + 300).beats.tolist() == [2] * 4
