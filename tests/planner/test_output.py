"""What `--out` names is written as a file, or refused; what standard output can't take is a sentence."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from openrecycle.agent.cli import read_token
from openrecycle.cli import main
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, Problem
from openrecycle.planner.output import check_out, write_out
from openrecycle.planner.plans.plan import Plan, PlanError, read_whole
from openrecycle.planner.simulation.traces import read_trace
from openrecycle.planner.solvers.portfolio import make_plan
from tests.conftest import at_length

SIZES = ("--pipelines", "2", "--stages", "2", "--micro-batches", "3", "--solver", "list")


def planner(*arguments: object, stdout: object = subprocess.PIPE) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "planner", *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=120, check=False)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / ("a-plan-with-a-name-that-is-long-enough-for-a-table" + ".json")
    path.write_text(make_plan(Problem(Job.uniform(2, 2, 3)), solver="list", look_ahead=False).to_json())
    return path


def test_a_link_is_written_through(tmp_path: Path) -> None:
    target, link, dangling = tmp_path / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_bytes(b"before")
    target.chmod(0o640)
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "new")
    write_out(link, b"after")
    write_out(dangling, b"there")
    assert link.is_symlink() and dangling.is_symlink()
    assert target.read_bytes() == b"after" and (tmp_path / "new").read_bytes() == b"there"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert len(list(tmp_path.iterdir())) == 4


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/full")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (
        Path("/dev/full"),
        Path("/dev/null"),
        tmp_path,
        tmp_path / "pipe",
        tmp_path / "link",
        tmp_path / "loop",
    ):
        with pytest.raises(InputError, match="--out"):
            write_out(path, b"text")
        with pytest.raises(InputError, match="--out"):
            check_out(path)
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode) and stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and (tmp_path / "link").is_symlink()
    assert not list(Path("/dev").glob("*.part"))


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"before")

    def disk_full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", disk_full)
    with pytest.raises(InputError, match="No space left on device"):
        write_out(out, b"after")
    assert out.read_bytes() == b"before" and list(tmp_path.iterdir()) == [out]


def test_a_disk_that_is_full_is_said_before_time_is_spent(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = tmp_path / "out"
    check_out(out)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(InputError, match="File too large"):
            check_out(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.parametrize("name", ["-", at_length("/dev/stdout")])
def test_standard_output_gets_the_document(name: str, plan_file: Path) -> None:
    made = planner("plan", *SIZES, "--out", name)
    assert made.returncode == 0 and made.stderr == b""
    assert Plan.from_json(made.stdout).metrics.period > 0
    exported = planner("export", plan_file, "--format", "json", "--out", name)
    assert exported.returncode == 0 and Plan.from_json(exported.stdout).metrics.period > 0


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [("plan", *SIZES), at_length(("plan", *SIZES, "--json")), at_length(("schema",))])
def test_a_full_standard_output_is_one_sentence(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = planner(*arguments, stdout=full)
    assert done.returncode == 2
    assert done.stderr == b"error: standard output can't be written: No space left on device\n"


@pytest.mark.processes
@pytest.mark.parametrize("command", [["--help"], at_length(["history", "--help"])])
def test_the_list_of_commands_where_nobody_reads_it_or_nothing_can_be_written(command: list[str]) -> None:
    program = [sys.executable, "-m", "openrecycle", *command]
    gone, out = os.pipe()
    os.close(gone)
    with Path("/dev/full").open("wb") as full, os.fdopen(out, "wb") as pipe:
        for stdout, status in ((pipe, 0), (full, 2)):
            done = subprocess.run(program, stdout=stdout, stderr=subprocess.PIPE, timeout=120, check=False)
            assert done.returncode == status and done.stderr.count(b"\n") == (status != 0)


@pytest.mark.processes
def test_a_device_in_the_place_of_a_file_stays_a_device() -> None:
    done = planner("plan", *SIZES, "--out", "/dev/full")
    assert done.returncode == 2 and done.stderr.startswith(b"error: --out: got '/dev/full', expected a regular file")
    assert done.stderr.count(b"\n") == 1 and stat.S_ISCHR(Path("/dev/full").stat().st_mode)


@pytest.mark.processes
def test_a_table_in_a_pipe_is_not_cut(plan_file: Path) -> None:
    table = planner("compare", plan_file, plan_file).stdout.decode()
    lines = [line for line in table.splitlines() if "fingerprint" in line or line.count(plan_file.name) > 1]
    assert max(map(len, table.splitlines())) > 80
    assert any(line.count(str(plan_file)) == 2 for line in lines)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "word"),
    [
        ("planner", "--no-such-option"),
        ("agent", "no-such-command"),
        at_length("planner", "no-such-command"),
        at_length("agent", "--no-such-option"),
    ],
)
def test_an_unknown_word_is_one_line(module: str, word: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, word], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/null"])
def test_a_device_is_not_read_to_an_end_that_it_has_not(device: str) -> None:
    with pytest.raises(PlanError, match="device"):
        Plan.load(device)
    with pytest.raises(InputError, match="device"):
        read_trace(Path(device))
    with pytest.raises(InputError, match="device"):
        read_token(Path(device))


def test_a_file_is_read_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "some"
    path.write_bytes(b"12345")
    assert read_whole(path, most=5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_whole(path, most=4)


def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("openrecycle.cli.import_module", interrupted)
    with pytest.raises(SystemExit) as ended:
        main("planner")
    assert ended.value.code == 130 and len(capsys.readouterr().err.splitlines()) == 1
