"""A disk that is full, a standard output that is closed or that nobody reads: said at once, and training goes on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openrecycle.agent.checkpoints import Claim
from openrecycle.agent.config.options import Checkpoints, TrainingOptions
from openrecycle.agent.coordination.local import LocalCoordination
from openrecycle.agent.launcher.launch import Launcher
from openrecycle.agent.launcher.processes import ProcessPool, preload
from openrecycle.agent.messages.client import Delivery, RecordFile
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.nodes.succession import Spool
from openrecycle.agent.workers import worker
from openrecycle.agent.workers.spec import RunSpec
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, Technique
from tests.agent import own_jobs
from tests.agent.launches import Launched, warm
from tests.agent.local_jobs import TINY as SMALL
from tests.agent.runs import SQUARE, TINY
from tests.conftest import NO_BYTECODE, refuses
from tests.golden import golden

FULL = Path("/dev/full")
JOB = [sys.executable, "-m", "agent", "train", *SQUARE, *TINY]


def limited(size: int) -> Callable[[], None]:
    """As a full disk: no file of the process, or of those it starts, grows beyond so many bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def launch(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*JOB, *arguments], stderr=subprocess.PIPE, text=True, timeout=120, check=False, **options)


@pytest.mark.processes
def test_a_full_disk_is_said_at_once_and_training_goes_on(tmp_path: Path) -> None:
    """Under the record, and under standard output."""
    errors = tmp_path / "errors.txt"
    job = Launched("train", *SQUARE, *TINY, "--iterations", "4", "--record", str(FULL), errors=errors, prints=FULL)
    assert job.wait(120) == 3, "trained to its end; the record lacks lines"
    told = errors.read_text()
    said = [line for line in told.splitlines() if "/dev/full" in line]
    assert len(said) == 2 and golden("cant-be-written-no-space-left") in said[0]
    assert golden("is-not-whole-5-lines") in said[1]
    assert told.count(golden("nothing-can-be-printed-any")) == 1
    assert "Traceback" not in told and "Exception ignored" not in told


@pytest.mark.processes
def test_a_model_that_prints_on_a_full_disk_is_not_to_blame(tmp_path: Path) -> None:
    record, errors = tmp_path / "run.jsonl", tmp_path / "errors.txt"
    grid = ("--pipelines", "2", "--stages", "2", "--micro-batches", "2", "--iterations", "4", "--record", str(record))
    task = ("--workload", "tests.agent.poisoned:Poisoned", "--workload-options", json.dumps(SMALL | {"prints": 9000}))
    job = Launched("train", *grid, *task, errors=errors, prints=FULL, alone=True)
    assert job.wait(120) == 0, errors.read_text()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert sum("loss" in line for line in lines) == 4 and not [line for line in lines if "raised" in line]
    said = [line["warning"] for line in lines if "is lost" in line.get("warning", "")]
    assert sorted(text.partition(":")[0] for text in said) == ["W0_0", "W1_0"], "each says it once"


@pytest.mark.chaos
@pytest.mark.processes
def test_what_a_model_prints_is_there_when_the_job_has_ended(tmp_path: Path) -> None:
    """Into a file, where Python writes it in large pieces."""
    grid = ("--pipelines", "1", "--stages", "1", "--micro-batches", "2", "--iterations", "3")
    task = ("--workload", "tests.agent.poisoned:Poisoned", "--workload-options", json.dumps(SMALL | {"prints": 40}))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command, printed = [sys.executable, "-m", "agent", "train", *grid, *task], tmp_path / "printed.txt"
    with printed.open("w") as out:
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=120, check=False, env=environment
        )
    assert done.returncode == 0, done.stderr
    assert printed.read_text().splitlines().count("." * 40) >= 6, "two micro-batches, three times"


@pytest.mark.processes
def test_a_disk_that_has_space_again_gets_the_whole_record(tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow until it has said that they can't."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import resource, sys
from pathlib import Path
import openrecycle.agent.messages.client as delivery
delivery.RETRY_SECONDS = 0.01
resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
said = []
def say(text):
    said.append(text)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file = delivery.RecordFile(Path({str(tmp_path / "run.jsonl")!r}), say)
record = delivery.Delivery(file, "the record", say)
for i in range(100):
    record({{"iteration": i, "loss": (1.0).hex()}})
assert record.close() and not record.left_out and not file.lost
print(len(said), "File too large" in said[0], "lacks nothing" in said[1])
"""
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": f"{root}/.src", **NO_BYTECODE},
    )
    assert done.stdout == "2 True True\n", done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(100))


@pytest.mark.processes
def test_a_trainers_record_is_said_to_lack_lines_and_the_result_is_whole(caplog: pytest.LogCaptureFixture) -> None:
    result = own_jobs.trainer(record=FULL).fit(iterations=3)
    assert len(result.losses) == 3
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2 and golden("cant-be-written-no-space") in said[0]
    assert golden("is-not-whole-4-lines") in said[1]


@pytest.mark.chaos
@pytest.mark.processes
def test_a_closed_standard_output_does_not_end_the_job(tmp_path: Path) -> None:
    """As with `| head -1`: the reader goes after the first line."""
    record = tmp_path / "run.jsonl"
    reads, writes = os.pipe()
    process = subprocess.Popen(
        [*JOB, "--iterations", "6", "--record", str(record)], stdout=writes, stderr=subprocess.PIPE, text=True
    )
    os.close(writes)
    assert os.read(reads, 1)
    os.close(reads)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert len(record.read_text().splitlines()) == 7
    assert [line for line in errors.splitlines() if "printed" in line] == [golden("warning-nothing-can-be-printed")]
    assert "Traceback" not in errors and "BrokenPipeError" not in errors


def full_pipe(path: Path) -> tuple[int, int, int]:
    """Its reading end, its writing end, and how many bytes are in it: as many as go in."""
    os.mkfifo(path)
    reads = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reads, True)
    writes = os.open(path, os.O_WRONLY)
    os.set_blocking(writes, False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(writes, b"." * 4096)
    os.set_blocking(writes, True)
    return reads, writes, filled


def wait_for(word: str, record: Path) -> None:
    for _ in range(1200):
        if record.exists() and word in record.read_text():
            return
        threading.Event().wait(0.1)
    raise TimeoutError(word)


@pytest.mark.processes
def test_nobody_reads_standard_output_and_training_goes_on(tmp_path: Path) -> None:
    """A pager that is left open: the pipe is full from the beginning. The job reaches its end, and once somebody
    reads, everything is there. One that is ended meanwhile does not wait for a reader."""
    record, errors, pipe = tmp_path / "run.jsonl", tmp_path / "errors.txt", tmp_path / "pipe"
    reads, writes, filled = full_pipe(pipe)
    shown = os.fdopen(reads)

    def started(iterations: int, record: Path) -> Launched:
        given = ("--iterations", str(iterations), "--record", str(record))
        return Launched("train", *SQUARE, *TINY, *given, errors=errors, prints=pipe)

    endless, job = started(100_000, tmp_path / "2"), started(6, record)
    try:
        wait_for('"iteration": 3', tmp_path / "2")
        os.close(writes)
        endless.terminate()
        assert endless.wait(60) == 128 + signal.SIGTERM
        wait_for('"final"', record)
    finally:
        endless.kill()
        out = shown.read()[filled:]
        status = job.wait(60)
    assert status == 0, errors.read_text()
    assert sum(line.startswith("iteration ") for line in out.splitlines()) == 6


@pytest.mark.processes
@pytest.mark.parametrize("option", ["weights", "checkpoints.directory"])
def test_a_folder_that_can_not_be_written_is_refused_before_the_training(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Any = tmp_path / "f"
    trainer = own_jobs.trainer(
        **{"weights": folder} if option == "weights" else {"checkpoints": Checkpoints(directory=folder)}
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    limited(1000)()
    try:
        with refuses(option):
            trainer.fit(iterations=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.processes
def test_what_an_earlier_run_left_half_written_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is removed once it is certain that no other job writes there. A disk that is full without it is refused."""
    own_jobs.trainer(checkpoints=Checkpoints(directory=tmp_path, every=1)).fit(iterations=1)
    left = [tmp_path / name for name in (".partial-0000000002-1", ".removed-iteration-0000000000")]
    for folder in left:
        (folder / "stage-0").mkdir(parents=True)
    (others := tmp_path / "others").touch()
    write = Path.write_bytes

    def on_a_full_disk(path: Path, data: bytes) -> int:
        if path.parent == tmp_path and any(file.exists() for file in (*left, others)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", on_a_full_disk)
    trainer = own_jobs.trainer(checkpoints=Checkpoints(directory=tmp_path, resume="newest"))
    claimed = Claim(tmp_path)
    with pytest.raises(InputError):
        trainer.fit(iterations=2)
    assert all(file.exists() for file in left)
    claimed.close()
    with pytest.raises(InputError) as caught:
        trainer.fit(iterations=2)
    assert caught.value.field == "checkpoints.directory" and not any(file.exists() for file in left)
    left[0].mkdir()
    others.unlink()
    assert len(trainer.fit(iterations=2).losses) == 1


def test_the_record_for_other_nodes_is_whole_whatever_its_file_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the file takes nothing all lines are there, too, and one line says so."""
    spool, told = Spool(), list[str]()

    def add(numbers: range) -> None:
        told.append(spool.add({"iteration": number, "loss": "x"} for number in numbers))

    def whole(last: int) -> None:
        assert len(spool) == last and [line["iteration"] for line in spool.lines()] == list(range(last))
        assert [json.loads(line)["iteration"] for line in b"".join(spool.parts()).splitlines()] == list(range(last))
        assert [line["iteration"] for line in spool.lines(2, 5)] == [2, 3, 4]
        assert [number for number, _ in spool.newest_losses(4)] == list(range(last - 4, last))
        for first, end in ((3, last), (1, 3)):
            lines = "".join(message["text"] for message in spool.messages(first, end)).splitlines()
            assert list(map(json.loads, lines)) == list(spool.lines(first, end))

    add(range(3))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    limited(150)()
    try:
        add(range(3, 10))
        add(range(10, 12))
        whole(12)
        spool.cut(11)
        whole(11)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    add(range(11, 14))
    whole(14)
    spool.cut(6)
    whole(6)
    assert [bool(text) for text in told] == [False, True, False, False]


class _Refuses(ProcessPool):
    """Can't hand out what other nodes are to know."""

    def hand_out(self, run: Any, saved: Any, *, last: bool = False) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Ends(LocalCoordination):
    ended: tuple[str, str] | None = None

    def finished(self, state: str, reason: str) -> None:
        self.ended = state, reason


@pytest.mark.processes
def test_a_launcher_that_fails_leaves_no_process_whatever_else_fails_at_its_end() -> None:
    warm()
    job, source = Job.uniform(2, 1, 2), NamedWorkload("openrecycle.agent.examples.gpt:Gpt", {"width": 32, "heads": 2})
    catalog = Catalog(job, Technique.STAGGERED, MemoryLimit("uniform"))
    pool, coordination = _Refuses(worker.main, preload(source)), _Ends(catalog)
    run = RunSpec(TrainingOptions(job=job, iterations=3), source)
    launcher = Launcher(run, coordination, lambda line: None, catalog, pool)
    with pytest.raises(OSError, match="No space"):
        launcher.run()
    assert not pool.running and coordination.ended is not None
    assert not launcher.pids


@pytest.mark.chaos
@pytest.mark.processes
def test_a_disk_too_small_costs_the_checkpoints_and_says_so_of_the_weights(tmp_path: Path) -> None:
    folders = ("--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "2", "--weights", str(tmp_path / "w"))
    environment = os.environ | NO_BYTECODE
    done = launch("--iterations", "4", *folders, stdout=subprocess.PIPE, preexec_fn=limited(20_000), env=environment)
    assert done.returncode == 1
    assert sum(line.startswith("iteration ") for line in done.stdout.splitlines()) == 4
    warned = [line for line in done.stderr.splitlines() if line.startswith("warning: no checkpoint of iteration")]
    assert {line.split(":")[1].rpartition(" ")[2] for line in warned} == {"2", "4"}
    assert all(golden("training-goes-on") in line for line in warned) and "Traceback" not in done.stderr
    (last,) = [line for line in done.stderr.splitlines() if line.startswith("the job ended early")]
    assert golden("could-not-be-written-to") in last and "File too large" in last


@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_is_full_at_the_end_costs_no_training(ranks: int, tmp_path: Path) -> None:
    """The weights are written once there is room, and several ranks wait for longer than one collective may take. The
    disk is one of memory, which this job alone sees."""
    mount, folder, errors = ("unshare", "--mount", "--map-root-user"), tmp_path / "disk", tmp_path / "errors.txt"
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    folder.mkdir()
    given = (
        *("--iterations", "20", "--pace", "F=20ms,I=20ms,W=20ms"),
        *("--silence-timeout", "4", "--transfer-timeout", "5", "--group-timeout", "6"),
        *("--workload-options", '{"layers": 4, "width": 32, "heads": 2, "sequence": 16, "batch": 2}'),
        *(() if ranks == 1 else ("--ranks-per-worker", "2", "--workload", "agent.examples.tensor_parallel:Gpt")),
        "--weights",
        str(folder / "w"),
        "--record",
        str(tmp_path / "run.jsonl"),
    )
    shell = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
    with errors.open("w") as out:
        job = subprocess.Popen([*mount, "sh", "-c", shell, str(folder), *JOB, *given], stderr=out, stdout=out)
        try:
            wait_for('"iteration": 3', tmp_path / "run.jsonl")
            there = Path(f"/proc/{job.pid}/root") / folder.relative_to("/")
            with pytest.raises(OSError, match="No space"):
                (there / "others").write_bytes(bytes(1 << 21))
            wait_for("No space left", tmp_path / "run.jsonl")
            time.sleep(10)  # twice what a collective may take
            (there / "others").unlink()
            wait_for('"final"', tmp_path / "run.jsonl")
            assert job.wait(60) == 0, errors.read_text()
        finally:
            job.kill()
            job.wait()
    *_, final = record = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert final["final"]["iterations"] == 20
    # The other ranks have not given up: a worker of each stage said why it waits, and nobody said anything else.
    assert [golden("could-not-be-written-to") in line["warning"] for line in record if "warning" in line] == [True] * 2


@pytest.mark.chaos
@pytest.mark.processes
def test_ranks_wait_for_the_one_that_writes_to_a_slow_disk(tmp_path: Path) -> None:
    timeouts = ("--silence-timeout", "4", "--transfer-timeout", "5", "--group-timeout", "6")
    of_ranks = ("--ranks-per-worker", "2", "--workload", "tests.agent.slow_disk:Gpt")
    options = ("--workload-options", '{"layers": 2, "width": 32, "heads": 2, "sequence": 16, "batch": 2}')
    weights = ("--weights", str(tmp_path / "w"), "--record", str(tmp_path / "run.jsonl"))
    done = launch("--iterations", "2", *timeouts, *of_ranks, *options, *weights)
    assert done.returncode == 0, done.stderr
    *_, final = record = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert "final" in final and not [line for line in record if "warning" in line]
    assert sorted(file.name for file in (tmp_path / "w").iterdir()) == ["layer0.safetensors", "layer1.safetensors"]


# -- the queue itself -------------------------------------------------------------------------


def test_a_target_that_stands_still_holds_up_nobody_and_what_it_missed_is_said() -> None:
    """Beyond the limit the oldest iterations go, never anything else; their number comes in their place."""
    go, begun = threading.Event(), threading.Event()
    got: list[dict[str, Any]] = []
    warned: list[str] = []

    def target(line: dict[str, Any]) -> None:
        begun.set()
        assert go.wait(60)
        got.append(line)

    delivery = Delivery(target, "the target", warned.append, limit=10)
    delivery({"iteration": 0, "loss": "0x0p+0"})
    assert begun.wait(60)
    delivery({"failure": {}})
    for i in range(1, 31):
        delivery({"iteration": i, "loss": "0x0p+0"})
    delivery({"final": {}})
    assert delivery.left_out == 22
    go.set()
    assert delivery.close()
    assert [line.get("iteration") for line in got if "loss" in line] == [0, *range(23, 31)]
    assert [next(iter(line)) for line in got if "loss" not in line] == ["warning", "failure", "final"]
    assert golden("22-iterations-are-missing-here") in str(got)
    (behind,) = warned
    assert behind.startswith(golden("the-target-is-10-lines"))


def test_a_hurry_ends_the_wait_for_a_target_that_hangs() -> None:
    never = threading.Event()
    delivery = Delivery(lambda line: never.wait(60) and None, "the target", print)
    delivery({"final": {}})
    assert not delivery.close(hurried=lambda: True)
    never.set()


def test_a_record_ends_without_a_gap(tmp_path: Path) -> None:
    """What is given up when the job is over is the end of the record, and its length is known."""
    file = RecordFile(FULL, lambda text: None)
    file.end()
    for _ in range(3):
        file({"final": {}})
    assert file.lost == 3


def test_a_record_that_was_there_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    path, said = tmp_path / "run.jsonl", list[str]()
    for number in (1, 2, 3):
        file = RecordFile(path, said.append)
        file({"run": number})
    kept = {found.name: json.loads(found.read_text())["run"] for found in tmp_path.iterdir()}
    assert kept == {"run.jsonl.1": 1, "run.jsonl.2": 2, "run.jsonl": 3}
    assert len(said) == 2 and "run.jsonl.2" in said[1]
