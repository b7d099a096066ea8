"""Traces: every public file is read, bad ones are refused with file, line and value."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import openrecycle.planner.simulation
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.simulation.traces import Domain, Event, Trace, from_history, generated, parse_trace, read_trace
from tests.golden import golden

DATA = Path(openrecycle.planner.simulation.__file__).parent / "data"

# file: (hours, fewest and most workers after the start, losses), as their sources describe them.
PUBLIC = {
    "bamboo/p3-trace.csv": (11.37, 10, 32, 167),
    "bamboo/g4dn-trace.csv": (10.77, 1, 24, 74),
    "bamboo/a100x1-east1b.txt": (27.0, 17, 64, 154),
    "bamboo/v100x1-east1c.txt": (24.2, 30, 80, 579),
    "bamboo/aws-spot-instances-p2-xlarge-2020-11-20-to-2020-11-23.csv": (88.7, 0, 16, 178),
    "bamboo/aws-spot-instances-g4dn-xlarge-us-east-1d-2020-11-23-1730-to-2020-11-24-1530.csv": (12.7, 1, 12, 51),
    "oobleck/1h.csv": (15.0, 15, 30, 15),
    "oobleck/scale_gcp-trace.csv": (10.77, 15, 30, 72),
    "oobleck/scale_p3-trace.csv": (11.37, 15, 30, 142),
    "parcae/gpt-1.5b-lh_80_90.txt": (1.0, 11, 24, 18),
    "parcae/gpt-6.7b-lh_80_90.txt": (1.0, 12, 24, 17),
    "recycle/gcp-6h.txt": (6.32, 15, 24, 27),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_files(name: str) -> None:
    trace = read_trace(DATA / name)
    hours, fewest, most, losses = PUBLIC[name]
    assert trace.hours == pytest.approx(hours, abs=0.05)
    assert (min(n for _, n in trace.counts), trace.most) == (fewest, most)
    assert sum(event.action == "remove" for event in trace.events) == losses


def average(trace: Trace) -> float:
    """Living workers, averaged over time from 0 to the end."""
    ends = [at for at, _ in trace.counts[1:]] + [trace.end]
    return sum(n * (end - begin) for (begin, n), end in zip(trace.counts, ends, strict=True)) / trace.end


def test_averages_as_described() -> None:
    assert average(read_trace(DATA / "oobleck/scale_gcp-trace.csv")) == pytest.approx(21.96, abs=0.01)
    assert average(read_trace(DATA / "bamboo/p3-trace.csv")) == pytest.approx(24.0, abs=0.05)
    assert average(read_trace(DATA / "recycle/gcp-6h.txt")) * 11.34 / 24 == pytest.approx(10.27, abs=0.02)


def test_every_public_file_is_read() -> None:
    tables = {"throughput-by-node-count.csv", "cost-constants.csv", "restart-by-node-count.csv"}
    tables |= {"throughput-by-gpu-count.csv"}
    files = [p for p in DATA.rglob("*") if p.suffix in (".csv", ".txt") and p.name not in tables]
    assert len(files) >= 20
    for path in files:
        assert read_trace(path).most > 0


def test_counts_give_the_same_trace_everywhere() -> None:
    text = "0,4\n10,4\n10,2\n20,2\n20,3\n"
    first, second = (parse_trace(text, name="same") for _ in range(2))
    assert first == second
    assert first.counts == ((0, 4), (10_000, 2), (20_000, 3))
    assert first.end == 20_000


# JSON's true is no time, though Python's is a 1.
NO_NUMBERS = (
    '[true, "no-op", {"nodes": [], "duration": 1}]',
    '[0, "no-op", {"nodes": [], "duration": true}]',
)


@pytest.mark.parametrize(
    ("text", "where", "value"),
    [
        ("", "bad", golden("an-empty-file")),
        ("hello\n", "bad line 1", "hello"),
        ("0,add,a\n\n5,drop,a\n", "bad line 3", "drop"),
        ("0,add,a\n5,remove,b\n", "bad line 2", "b"),
        ("0,add,a\n5,add,a\n", "bad line 2", "a"),
        ("5,add,a\n4,add,b\n", "bad line 2", "4"),
        ("-5,add,a\n", "bad line 1", "-5"),
        ("0,add,a\n1e3,add,b\n", "bad line 2", "1e3"),
        ("0,add,a\n5,add\n", "bad line 2", "5,add"),
        ("0,5\n1_0,4\n", "bad line 2", "1_0"),
        ("0,add,a\n99999999999999,remove,a\n", "bad line 2", "99999999999999"),
        ("0,add,a\n", "bad", "0 ms"),
        ("2021-12-11, 11:11:30, 5\n2021-12-11, 11:11, 5\n", "bad line 2", "2021-12-11, 11:11, 5"),
        ("2021-12-11, 11:11:30, 5\n2021-13-11, 11:11:30, 5\n", "bad line 2", "2021-13-11, 11:11:30"),
        ("0,3\n5,x\n", "bad line 2", "x"),
        ("5,3\n4,3\n", "bad line 2", "4"),
        ("0,0\n5,0\n", "bad", golden("counts-that-are-all-0")),
        ("0:3 .5:x\n", "bad line 1", ".5:x"),
        ("0:3 .5:2\n.4:3\n", "bad line 2", ".4:3"),
        ("0:3 .5:2 end\n", "bad line 1", "end"),
        ("0:3 .5:2 end .4\n", "bad line 1", ".4"),
        ('[0, "add", {"nodes": ["a"], "duration": 60000}]\n[0, "no-op", {}]\n', "bad line 2", '[0, "no-op", {}]'),
        ('[0, "remove", {"nodes": ["a"], "duration": 60000}]\n', "bad line 1", "a"),
        ('[0, "add", {"nodes": ["a"], "duration": 60000}]\n[0, ', "bad line 2", "[0,"),
        *((row, "bad line 1", row) for row in NO_NUMBERS),
    ],
)
def test_bad_traces(text: str, where: str, value: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_trace(text, name="bad")
    assert caught.value.field == where
    assert str(caught.value.value) == value
    assert caught.value.expected


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.csv"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe0")
    with pytest.raises(InputError, match="UTF-8"):
        read_trace(tmp_path / "bytes")


@given(st.text(max_size=200))
def test_any_text_is_a_trace_or_refused(text: str) -> None:
    try:
        trace = parse_trace(text, name="any")
    except InputError:
        return
    assert trace.end > 0 and trace.most >= 1


def test_a_worker_that_returns_has_a_new_name() -> None:
    events = [Event(0, "add", "W0_0"), Event(5, "remove", "W0_0"), Event(9, "add", "W0_0"), Event(12, "remove", "W0_0")]
    trace = Trace.of("returns", events)
    assert [event.worker for event in trace.events] == ["W0_0", "W0_0", "W0_0#2", "W0_0#2"]


def test_the_new_name_is_nobody_elses() -> None:
    lines = ["0,add,a", "0,add,a#2", "5,remove,a", "9,add,a", "12,remove,a", "13,remove,a#2", "99,add,b"]
    trace = parse_trace("\n".join(lines), name="named")
    assert [event.worker for event in trace.events] == ["a", "a#2", "a", "a#3", "a#3", "a#2", "b"]


def test_generated_failures_have_their_mean() -> None:
    domains = [Domain(1, mtbf=100, repair=2, shape=0.7)]
    trace = generated(200, 1000, domains, seed=1)
    losses = sum(event.action == "remove" for event in trace.events)
    assert losses == pytest.approx(200 * 1000 / 102, rel=0.1)
    assert average(trace) == pytest.approx(200 * 100 / 102, rel=0.02)
    assert trace == generated(200, 1000, domains, seed=1) != generated(200, 1000, domains, seed=2)


def test_a_host_fails_as_one() -> None:
    trace = generated(32, 2000, [Domain(8, mtbf=200, repair=1)], seed=3)
    by_time: dict[int, set[int]] = {}
    for event in trace.events:
        if event.action == "remove":
            by_time.setdefault(event.time, set()).add(int(event.worker.split("#")[0][4:]) // 8)
    assert by_time and all(len(hosts) == 1 for hosts in by_time.values())
    sizes = [n for _, n in trace.counts]
    assert all(n % 8 == 0 for n in sizes) and statistics.mean(sizes) < 32


def test_a_worker_down_twice_returns_once() -> None:
    """Down with its host and by itself: back when both are repaired; `Trace.of` would refuse anything else."""
    trace = generated(16, 500, [Domain(1, 10, 5), Domain(8, 20, 5), Domain(16, 50, 5)], seed=4)
    assert 0 < average(trace) < 16


@pytest.mark.parametrize(
    ("workers", "hours", "domain", "field"),
    [
        (0, 1, Domain(1, 1, 1), "workers"),
        (4, 0, Domain(1, 1, 1), "hours"),
        (4, 1, Domain(0, 1, 1), "domains[0] size"),
        (4, 1, Domain(1, 0, 1), "domains[0] mtbf"),
        (4, 1, Domain(1, 1e305, 1), "domains[0] mtbf"),
        (4, 1, Domain(1, 1, 1e305), "domains[0] repair"),
        (4, 1, Domain(1, 1, -1), "domains[0] repair"),
        (4, 1, Domain(1, 1, 1, shape=0), "domains[0] shape"),
        (200_000, 80_000, Domain(1, 1, 1), "mtbf"),
    ],
)
def test_bad_distributions(workers: int, hours: float, domain: Domain, field: str) -> None:
    with pytest.raises(InputError) as caught:
        generated(workers, hours, [domain])
    assert caught.value.field == field


def test_a_jobs_own_history() -> None:
    rows = [(10.0, "W0_1", "failed"), (20.0, "W0_1", "failed"), (30.5, "W0_1", "joined"), (40.0, "W1_0", "failed")]
    trace = from_history([*rows, (31.0, "W0_1", "joined")], ["W0_0", "W0_1", "W1_0", "W1_1"], end=60)
    assert trace.counts == ((0, 4), (10_000, 3), (30_500, 4), (40_000, 3))
    assert trace.end == 60_000


def test_bursts_are_counted_as_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so long a tail hardly a failure is expected, and very many are drawn."""
    few = generated(20, 168, [Domain(1, 10_000, 0.001, shape=0.05)])
    assert len(few.events) > 2_000
    monkeypatch.setattr("openrecycle.planner.simulation.traces.MOST_FAILURES", 100_000)
    with pytest.raises(InputError, match="mtbf"):
        generated(4_000, 168, [Domain(200, 10_000, 0, shape=0.05)])
