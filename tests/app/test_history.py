"""A job's history as a file: out of one database and into another, and what is not let in."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from history_job import NAMES, everything, lived_job
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.testclient import TestClient
from typer.testing import CliRunner

from openrecycle.app.cli import cli
from openrecycle.app.console.service import ConsoleService
from openrecycle.app.observing import history as histories
from openrecycle.app.observing.history import (
    EXPORTED,
    LEFT_OUT,
    MOST_MEMORY,
    Histories,
    HistoryError,
    Manifest,
    delete_job,
    export,
    format_of,
    import_history,
    table_file,
)
from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.processes import Channel
from openrecycle.app.server import create_routes
from openrecycle.db.access import AuditStore
from openrecycle.db.job_rows import MODELS, HiddenJob, JobRows, table
from openrecycle.db.models import AuditRow, Base, JobRow, PlanRow
from openrecycle.db.session import Database
from openrecycle.db.store import Store
from openrecycle.planner.plans.packed import pack
from openrecycle.planner.plans.plan import Plan
from openrecycle.scratch import scratch
from tests.conftest import at_length, new_database
from tests.golden import golden

pytestmark = pytest.mark.processes


def opened(url: str) -> Database:
    database = Database(url)
    database.upgrade()
    return database


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files are put for a while."""
    monkeypatch.setattr(histories, "scratch", lambda: str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, str, Path]]:
    """A database with a finished job and another, the id of the first, and its file. Not to be changed."""
    folder = tmp_path_factory.mktemp("origin")
    database = opened(f"sqlite:///{folder / 'origin.db'}")
    console = ConsoleService(Store(database))
    try:
        job_id = lived_job(console)
        lived_job(console, finished=False)
    finally:
        console.close()
    assert export(database, job_id, folder / "job.zip")
    yield database, job_id, folder / "job.zip"
    database.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Database]:
    database = opened(f"sqlite:///{tmp_path / 'target.db'}")
    yield database
    database.close()


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """Into which nothing gets."""
    database = opened(f"sqlite:///{tmp_path_factory.mktemp('empty') / 'empty.db'}")
    yield database
    database.close()


def counts(database: Database) -> dict[str, int]:
    with database.read() as session:
        return {
            t.name: session.scalar(select(func.count()).select_from(t)) or 0
            for t in Base.metadata.sorted_tables
            if t.name not in ("audit", "leadership")
        }


def test_a_file_that_can_not_be_written_is_named_as_the_user_has_named_it(
    origin: tuple[Database, str, Path], tmp_path: Path
) -> None:
    """It is written beside, under a longer name, which this file system does not take."""
    database, job_id, _ = origin
    name, url = str(tmp_path / ("x" * 250)), database.url.render_as_string()
    done = CliRunner().invoke(cli, ["export", "--job", job_id, "--out", name, "--database-url", url])
    assert done.exit_code == 2 and done.stderr.startswith(f"--out: got {name!r}, "), done.stderr
    assert ".part" not in done.stderr and not list(tmp_path.iterdir())


def test_there_and_back_again_equal_row_by_row(
    origin: tuple[Database, str, Path], target: Database, postgres_url: str, tmp_path: Path
) -> None:
    source, job_id, path = origin
    wanted = everything(source, job_id)
    assert all(wanted[name] for name in wanted), "every table is put to the test"
    assert [row["let_go"] for row in wanted["generation"]] == [[], [], [["W1_1", False]]]
    postgres = opened(new_database(postgres_url))
    try:
        done = import_history(postgres, path)
        assert done.job_id == job_id and done.rows == sum(map(len, wanted.values()))
        assert everything(postgres, job_id) == wanted
        assert export(postgres, job_id, tmp_path / "again.zip")
        with pytest.raises(HistoryError, match=golden("is-there-already-and-is", job_id)):
            import_history(postgres, path)
        assert import_history(postgres, path, new_id="other").job_id == "other"
        assert everything(postgres, "other") == wanted
    finally:
        postgres.close()
    import_history(target, tmp_path / "again.zip")
    assert everything(target, job_id) == wanted
    with source.read() as a, target.read() as b:
        query = select(PlanRow.fingerprint, PlanRow.data).order_by(PlanRow.fingerprint)
        plans = {row.fingerprint: row.data for row in a.execute(query)}
        assert {row.fingerprint: row.data for row in b.execute(query)}.items() <= plans.items()
        assert b.scalar(select(func.count()).select_from(PlanRow)) == done.plans
        assert [row.action for row in b.scalars(select(AuditRow))] == ["import"], "the audit log is never imported"


def test_plans_are_packed_while_others_can_write(
    origin: tuple[Database, str, Path], target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 2,048 workers takes a second or more, and SQLite has one writer."""
    *_, path = origin
    writing, begun = [0], target.write

    @contextmanager
    def write(**how: Any) -> Iterator[Session]:
        with begun(**how) as session:
            writing[0] += 1
            yield session
            writing[0] -= 1

    def packed(plan: Plan) -> bytes:
        assert writing == [0]
        return pack(plan)

    monkeypatch.setattr(target, "write", write)
    monkeypatch.setattr(histories, "pack", packed)
    assert import_history(target, path).plans > 0


def test_a_damaged_plan_is_named_and_leaves_no_file(
    origin: tuple[Database, str, Path], target: Database, tmp_path: Path
) -> None:
    _, job_id, path = origin
    import_history(target, path)
    with target.write() as session:
        session.execute(update(PlanRow).values(data=b"nonsense"))
    with pytest.raises(HistoryError):
        export(target, job_id, tmp_path / "damaged.zip")
    assert not list(tmp_path.glob("damaged*"))


def test_an_imported_job_is_looked_at_as_any_other(origin: tuple[Database, str, Path], target: Database) -> None:
    _, job_id, path = origin
    import_history(target, path)
    console = ConsoleService(Store(target))
    console.start()
    try:
        view = console.queries.view(job_id)
        assert {w.name for w in view.workers} == set(NAMES) and view.plan is not None
        assert console.jobs.find(job_id).state.job_state == "finished"
        assert len(console.queries.iterations(job_id, -1, 100)) == 7
    finally:
        console.close()


def test_who_may_not_read_the_audit_log_gets_none_of_it_in_the_file(
    origin: tuple[Database, str, Path], target: Database, tmp_path: Path
) -> None:
    source, job_id, _ = origin
    made = export(source, job_id, tmp_path / "job.zip", audit=False)
    assert made is not None and made.tables["audit"].rows == 0
    with zipfile.ZipFile(tmp_path / "job.zip") as archive:
        assert archive.read(table_file("audit")) == b""
    assert import_history(target, tmp_path / "job.zip").job_id == job_id


def test_a_job_that_runs_is_stopped_where_it_is_imported(
    origin: tuple[Database, str, Path], target: Database, tmp_path: Path
) -> None:
    source, finished, _ = origin
    other = next(row["id"] for row in Store(source).jobs() if row["id"] != finished)
    assert export(source, other, tmp_path / "job.zip")
    import_history(target, tmp_path / "job.zip")
    job = Store(target).jobs()[0]
    assert job["state"] == "stopped" and golden("when-its-history-was-exported") in job["reason"]
    workers = {row["name"]: row["state"] for row in Store(target).workers(other)}
    assert workers == {name: "failed" if name in ("W1_0", "W1_1") else "finished" for name in NAMES}
    assert export(source, "nobody", tmp_path / "none.zip") is None
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix in (".zip", ".part")) == ["job.zip"]


def test_every_table_of_a_job_is_exported_or_said_not_to_be() -> None:
    apart = {"token"}  # secrets, of this console alone
    of_job = {t.name for t in Base.metadata.sorted_tables if "job_id" in t.columns}
    assert of_job - apart == set(EXPORTED) - {"job"}
    for name in EXPORTED:
        exported = set(format_of(name).line.model_fields)
        assert exported | {"job_id", *LEFT_OUT.get(name, ())} >= set(table(name).columns.keys()), name


def rewritten(path: Path, out: Path, change: Callable[[dict[str, bytes], dict[str, Any]], None]) -> Path:
    """The file with its parts changed; sums and sizes are put right unless the manifest's text was changed."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(parts.pop("manifest.json"))
    change(parts, manifest)
    text = parts.pop("manifest.json", None)
    for name, data in parts.items():
        kind, _, rest = name.partition("/")
        entry = manifest.get(kind, {}).get(rest.rpartition(".")[0])
        if entry:
            entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            if kind == "tables":
                entry["rows"] = data.count(b"\n")
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
        archive.writestr("manifest.json", text if text is not None else json.dumps(manifest))
    return out


def row(in_table: str, /, number: int = 0, **columns: Any) -> Callable[[dict[str, bytes], dict[str, Any]], None]:
    """One row with other values."""

    def change(parts: dict[str, bytes], manifest: dict[str, Any]) -> None:
        lines = parts[table_file(in_table)].splitlines(keepends=True)
        lines[number] = json.dumps({**json.loads(lines[number]), **columns}).encode() + b"\n"
        parts[table_file(in_table)] = b"".join(lines)

    return change


def without(column: str) -> Callable[[dict[str, bytes], dict[str, Any]], None]:
    """As a version wrote generations that did not have this column."""

    def change(parts: dict[str, bytes], manifest: dict[str, Any]) -> None:
        lines = [json.loads(line) for line in parts[table_file("generation")].splitlines()]
        kept = [{name: value for name, value in line.items() if name != column} for line in lines]
        parts[table_file("generation")] = b"".join(json.dumps(line).encode() + b"\n" for line in kept)

    return change


def part(name: str, data: bytes | None) -> Callable[[dict[str, bytes], dict[str, Any]], None]:
    return lambda parts, _: parts.update({name: data}) if data is not None else parts.pop(name) and None


def first_plan(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, bytes], dict[str, Any]], None]:
    def of_parts(parts: dict[str, bytes], manifest: dict[str, Any]) -> None:
        name = min(n for n in parts if n.startswith("plans/"))
        plan = json.loads(parts[name])
        change(plan)
        parts[name] = json.dumps(plan).encode()

    return of_parts


def twice(parts: dict[str, bytes], manifest: dict[str, Any]) -> None:
    name = table_file("event")
    parts[name] = parts[name].splitlines(keepends=True)[0] * 2


def forgotten(parts: dict[str, bytes], manifest: dict[str, Any]) -> None:
    del manifest["tables"]["generation"]


def other_plan(parts: dict[str, bytes], manifest: dict[str, Any]) -> None:
    a, b = sorted(n for n in parts if n.startswith("plans/"))[:2]
    parts[a] = parts[b]


COLUMNS = ("pipelines", "micro_batches", "starts_us", "durations_us")


def as_run(**changes: object) -> dict[str, object]:
    """An iteration in which one worker ran what no chart can draw."""
    ops = {"kinds": "FBO"} | {column: [0, 0, 0] for column in COLUMNS} | changes
    document = {"iteration": 3, "generation": 2, "plan_fingerprint": "f", "at": 1.0, "uncertainty_us": 0}
    return document | {"workers": {"W0_0": ops}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (part("../../evil", b"x"), "got '../../evil' in it"),
        (part("/etc/cron.d/x", b"x"), golden("which-the-manifest-does-not")),
        (part(table_file("iteration"), None), "tables/iteration.jsonl is missing"),
        (forgotten, "table 'generation' is missing"),
        (part("manifest.json", b"{}"), "manifest.json: format: Field required"),
        (part("manifest.json", b"[" * 100_000), "manifest.json:"),
        (lambda parts, m: m.update(version=2), "manifest.json: version"),
        (part(table_file("event"), b"\0" * 300_000_000), golden("at-most-200-times-as")),
        (part(table_file("event"), b"not json\n"), "tables/event.jsonl, line 1: the line: Invalid JSON"),
        (part(table_file("event"), b'{"seq": 1}\n'), "tables/event.jsonl, line 1: at: Field required"),
        (twice, golden("expected-more-than-the-row")),
        (row("event", seq=1.5), "seq"),
        (row("event", at="later"), "at: "),
        (row("event", at=1e20), "at: "),
        (row("job", created_at=1e20), "created_at: "),
        (row("worker", heard_at=-1.0), "heard_at: "),
        (row("event", text="a\0b"), "without NUL"),
        (row("event", worker="W9_9"), golden("expected-one-of-the-jobs")),
        (row("event", severity="loud"), "severity"),
        (row("event", extra=1), "extra"),
        (without("lost"), "lost"),
        (row("worker", name="W5_5"), "expected"),
        (row("worker", retired="no list"), "retired"),
        (row("job", spec={"name": "x"}), "spec"),
        (row("job", state="importing"), "state"),
        (row("job", id="../x"), "id: "),
        (row("job", broken=7), "broken"),
        (row("iteration", loss=float("inf")), "loss"),
        (row("iteration", iteration=10**6), "iteration"),
        (row("iteration", loss_hex="a loss"), "loss_hex"),
        (row("generation", plan_fingerprint="f" * 32), golden("expected-one-of-the-files")),
        (row("generation", living=["W0_0", "W7_0"]), "living: got 'W7_0'"),
        (row("generation", generation=2**70), "generation"),
        (row("generation", let_go=[["W0_0", True], ["W7_0", False]]), "let_go: got 'W7_0'"),
        (row("generation", let_go=[["W0_0", "perhaps"]]), "let_go"),
        (row("heartbeat", data="AAAA"), "data: "),
        (row("heartbeat", data="\u00e9"), "data"),
        (row("heartbeat", worker_group=3), golden("not-of-group-3")),
        (row("heartbeat", begin=5), golden("its-times-are-not-those")),
        (row("measured_iteration", document={"iteration": 1}), "document"),
        (row("measured_iteration", document=as_run(kinds="FXO")), "document.workers.W0_0.kinds"),
        (row("measured_iteration", document=as_run(starts_us=[0, 5])), "starts_us: got 2"),
        (row("measured_iteration", document=as_run(starts_us=[0, 5, 10**30])), "document.workers.W0_0.starts_us"),
        (row("measured_iteration", document=as_run(kinds="", **{column: [] for column in COLUMNS})), "kinds"),
        (row("command", kind="format"), "kind"),
        (first_plan(lambda plan: plan.update(failed=["W0_0"])), "plans/"),
        (first_plan(lambda plan: plan["metrics"].update(period=1e-9)), "period"),
        (other_plan, golden("got-another-plan-than-that")),
    ],
)
def test_what_is_not_let_in(
    origin: tuple[Database, str, Path], empty: Database, tmp_path: Path, change: Any, words: str
) -> None:
    before = counts(empty)
    path = rewritten(origin[2], tmp_path / "changed.zip", change)
    with pytest.raises(HistoryError) as refused:
        import_history(empty, path)
    assert words in str(refused.value) and len(str(refused.value)) < 500 and "\n" not in str(refused.value)
    assert counts(empty) == before, "nothing is stored"


@pytest.mark.parametrize(("kept", "times"), [(1 << 20, 1), (0, 2)], ids=["with room", "without"])
def test_a_plan_is_parsed_once_if_there_is_room_for_it(
    origin: tuple[Database, str, Path], target: Database, monkeypatch: pytest.MonkeyPatch, kept: int, times: int
) -> None:
    """That of 2,048 workers takes more than a second."""
    parsed: list[str | bytes] = []

    class Counted:
        @staticmethod
        def from_json(text: str | bytes, **more: str) -> Plan:
            parsed.append(text)
            return Plan.from_json(text, **more)

    monkeypatch.setattr(histories, "MOST_KEPT", kept)
    monkeypatch.setattr(histories, "Plan", Counted)
    done = import_history(target, origin[2], new_id=f"kept-{kept}")
    assert len(parsed) == times * done.plans == times * len(set(parsed)) > 0


def test_files_that_are_no_history(origin: tuple[Database, str, Path], target: Database, tmp_path: Path) -> None:
    path = tmp_path / "file"
    whole = origin[2].read_bytes()
    for data in (
        b"",
        b"PK",
        b"hello" * 100,
        whole[:-50],
        whole[: len(whole) // 2],
        whole[:40] + b"damage" + whole[46:],
    ):
        path.write_bytes(data)
        with pytest.raises(HistoryError):
            import_history(target, path)
    with pytest.raises(HistoryError, match=golden("cant-be-read")):
        import_history(target, tmp_path / "nothing")
    # Others of its kind have no end.
    with pytest.raises(HistoryError, match=golden("is-no-regular-file")):
        import_history(target, Path("/dev/null"))
    with pytest.raises(HistoryError, match="id: got 'a b'"):
        import_history(target, origin[2], new_id="a b")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"x")
    with pytest.raises(HistoryError, match=golden("it-has-no-manifest-json")):
        import_history(target, path)


def test_a_directory_beyond_all_bounds(target: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "MOST_DIRECTORY", 1000)
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for i in range(100):
            archive.writestr(f"file{i}", b"")
    with pytest.raises(HistoryError, match=golden("its-directory-has")):
        import_history(target, tmp_path / "many.zip")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sha256": "0" * 64}, golden("sha-256-are-not-those")),
        ({"bytes": 10}, golden("its-bytes-or-their")),
        ({"rows": 10**6}, golden("expected-1000000-as-the-manifest")),
        ({"bytes": -1}, golden("bytes-input-should-be-greater")),
        ({"bytes": 2**49}, golden("expected-at-most-that")),
    ],
)
def test_sums_that_do_not_agree(
    origin: tuple[Database, str, Path], target: Database, tmp_path: Path, wrong: dict[str, Any], words: str
) -> None:
    def change(parts: dict[str, bytes], manifest: dict[str, Any]) -> None:
        manifest["tables"]["event"].update(wrong)
        parts["manifest.json"] = json.dumps(manifest).encode()

    with pytest.raises(HistoryError, match=words):
        import_history(target, rewritten(origin[2], tmp_path / "sums.zip", change))


def test_an_import_that_breaks_off_leaves_nothing(
    origin: tuple[Database, str, Path], target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = counts(target)
    monkeypatch.setattr(histories, "BATCH", 2)
    steps = 0

    def broken(seconds: float) -> None:
        nonlocal steps
        steps += 1
        if steps == 12:
            raise OSError("no space left on the disk")

    with pytest.raises(OSError, match="no space left"):
        import_history(target, origin[2], rest=broken)
    assert counts(target) == before
    # A process that died has left its half; whoever starts next finds it.
    rows = JobRows(target)
    monkeypatch.setattr(histories, "delete_job", lambda *_: None)
    steps = 0
    with pytest.raises(OSError, match="no space left"):
        import_history(target, origin[2], rest=broken)
    assert Store(target).jobs() == []
    [(job_id, state, note)] = rows.hidden()
    assert rows.delete_some(HiddenJob(job_id, "deleting", "")) is False and rows.hidden(), "of a deletion before"
    assert (job_id, state) == (origin[1], "importing") and not histories.abandoned(note), "this process lives"
    with pytest.raises(HistoryError, match=golden("is-there-already")):
        import_history(target, origin[2])
    with subprocess.Popen(["true"]) as ended:
        pass
    gone = f"{socket.gethostname()} {ended.pid}/1 1"
    assert histories.abandoned(f"{note.rpartition('/')[0]}/1 {time.time():.0f}"), "another process of that number"
    assert histories.abandoned(gone) and histories.abandoned("other-host 1 1.0")
    assert not histories.abandoned(f"other-host 1 {time.time()}") and not histories.abandoned("")
    with target.write() as session:
        session.execute(update(JobRow).values(reason=gone))
    monkeypatch.undo()
    import_history(target, origin[2])
    assert everything(target, origin[1]) == everything(origin[0], origin[1])


def test_deleting_one_of_two_jobs_that_share_plans(origin: tuple[Database, str, Path], target: Database) -> None:
    _, job_id, path = origin
    import_history(target, path)
    before, plans = everything(target, job_id), counts(target)["plan"]
    import_history(target, path, new_id="copy")
    assert counts(target)["plan"] == plans, "equal plans are stored once"
    rows = JobRows(target)
    audit = {"at": 1.0, "actor": "Ann", "action": "delete", "job_id": "copy", "target": "copy", "detail": ""}
    copy = rows.hide("copy", audit)
    assert copy and not rows.hide("copy", audit) and not rows.hide("nobody", audit)
    assert [row["id"] for row in Store(target).jobs()] == [job_id]
    delete_job(rows, copy)
    assert everything(target, job_id) == before and counts(target)["plan"] == plans
    hidden = rows.hide(job_id, {**audit, "job_id": job_id})
    assert hidden
    delete_job(rows, hidden)
    assert not any(counts(target).values()), "plans that nobody has are gone, too"
    assert {row["action"] for row in AuditStore(target).read(job_id="copy")} == {"import", "delete"}


def test_the_manifest_is_one(origin: tuple[Database, str, Path]) -> None:
    with zipfile.ZipFile(origin[2]) as archive:
        manifest = Manifest.model_validate_json(archive.read("manifest.json"))
        assert manifest.job == origin[1] and set(manifest.tables) == {"job", "audit", *MODELS}
        events = [json.loads(line) for line in archive.read(table_file("event")).splitlines()]
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    assert any(golden("ann-asked-to-kill-w1") in e["text"] for e in events)


@pytest.mark.parametrize("asked", [at_length("bytes=abc"), at_length("bytes=999999999-"), "bytes=0-3", None])
def test_an_exported_file_is_sent_whole_and_is_gone_whatever_part_was_asked_for(
    origin: tuple[Database, str, Path], temporary: Path, asked: str | None
) -> None:
    source, job_id, path = origin
    console = ConsoleService(Store(source))
    console.jobs.follow()
    try:
        client = TestClient(Starlette(routes=create_routes(console)), base_url="http://localhost")
        headers = {"Range": asked} if asked else {}
        answer = client.get(f"/api/v1/jobs/{job_id}/history.zip", headers=headers)
    finally:
        console.close()
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/zip")
    assert answer.headers["accept-ranges"] == "none"
    (temporary / "got.zip").write_bytes(answer.content)
    with zipfile.ZipFile(temporary / "got.zip") as got, zipfile.ZipFile(path) as made:
        assert got.namelist() == made.namelist() and got.testzip() is None
    assert not [*temporary.glob("history-*")]


def test_files_that_nobody_reads_to_the_end_are_a_few(origin: tuple[Database, str, Path], temporary: Path) -> None:
    source, job_id, _ = origin
    console = ConsoleService(Store(source))
    console.jobs.follow()

    async def whole() -> None:
        sent = [await console.histories.export(job_id, audit=False) for _ in range(histories.MOST_FILES)]
        with pytest.raises(ConsoleError) as refused:
            await console.histories.export(job_id, audit=False)
        assert (refused.value.status, refused.value.code) == (409, "busy")
        assert len([*temporary.glob("history-*")]) == len(sent)
        sent[1].unlink()
        assert (await console.histories.export(job_id, audit=False)).exists()

    try:
        asyncio.run(whole())
    finally:
        console.close()


def test_of_a_console_that_is_killed_the_next_one_removes_what_it_exported(origin: tuple[Database, str, Path]) -> None:
    """It lies in the folder of which tests/agent/test_scratch.py looks that it goes."""
    source, job_id, _ = origin
    console = ConsoleService(Store(source))
    console.jobs.follow()
    try:
        exported = asyncio.run(console.histories.export(job_id, audit=False))
    finally:
        console.close()
    assert exported.parent == Path(scratch())
    exported.unlink()


def test_what_a_killed_export_has_written_is_gone(
    origin: tuple[Database, str, Path], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked for it left meanwhile."""
    source, job_id, _ = origin
    console = ConsoleService(Store(source))
    console.jobs.follow()
    monkeypatch.setattr(histories, "work", half_a_file)
    exports = Histories(console.jobs, source)

    async def leave() -> None:
        task = asyncio.create_task(exports.export(job_id, audit=False))
        while not [*temporary.glob("*.part")]:
            assert not task.done(), task
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        asyncio.run(leave())
    finally:
        exports.close()
        console.close()
    assert not [*temporary.glob("history-*")]


def test_an_export_that_takes_too_much_memory_ends_its_own_process(
    origin: tuple[Database, str, Path], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, job_id, _ = origin
    console = ConsoleService(Store(source))
    console.jobs.follow()
    monkeypatch.setattr(histories, "work", a_greedy_export)
    exports = Histories(console.jobs, source)
    try:
        with pytest.raises(ConsoleError) as refused:
            asyncio.run(exports.export(job_id, audit=False))
        assert refused.value.code == "too_large"
    finally:
        exports.close()
        console.close()
    assert not [*temporary.glob("history-*")]


def a_greedy_export(channel: Channel, url: str, job_id: str, out: str, audit: bool) -> None:
    """In a child: what a small one takes from the system depends on what its process has left of its own."""
    Path(f"{out}.part").write_bytes(b"half")
    bytearray(2 * MOST_MEMORY)
    Path(f"{out}.part").rename(out)


def half_a_file(channel: Channel, url: str, job_id: str, out: str, audit: bool) -> None:
    """In a child: an export that does not get on."""
    Path(f"{out}.part").write_bytes(b"half")
    threading.Event().wait()
