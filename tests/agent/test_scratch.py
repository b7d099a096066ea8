"""What a process that is killed leaves in the folder for temporary files: nothing that the next one does not remove."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
_A_SERVER = """
from openrecycle.forking import start_server
start_server([]).Process(target=int).start()
print("runs", flush=True)
input()
"""
_A_FOLDER = """
from openrecycle.scratch import scratch
print(scratch(), flush=True)
input()
"""


@contextmanager
def running(program: str, temporary: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """With the first line that it prints."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/.src", "TMPDIR": str(temporary)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, env=environment, **pipes) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.parametrize("program", [_A_FOLDER, _A_SERVER], ids=["folder", "server"])
def test_who_ends_in_order_leaves_nothing(program: str, tmp_path: Path) -> None:
    with running(program, tmp_path) as (process, _):
        assert len([*tmp_path.iterdir()]) == 1
        process.communicate("\n", timeout=60)
        assert process.returncode == 0 and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("program", [_A_FOLDER, _A_SERVER], ids=["folder", "server"])
def test_the_next_one_removes_what_one_that_was_killed_has_left(program: str, tmp_path: Path) -> None:
    with running(program, tmp_path) as (process, _):
        process.kill()
        process.wait(60)
    (left,) = tmp_path.iterdir()
    with running(_A_FOLDER, tmp_path) as (_, folder):
        assert [*tmp_path.iterdir()] == [Path(folder)] != [left]


def test_what_lives_or_is_another_is_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("orec-00000000", "orec-notmade!", "elsewhere")]
    for folder in others:
        folder.mkdir()
        (folder / "file").touch()
    (tmp_path / "elsewhere" / ".openrecycle").touch()
    link = tmp_path / "orec-11111111"
    link.symlink_to(tmp_path / "elsewhere")
    with running(_A_FOLDER, tmp_path) as (_, first):
        (Path(first) / "file").touch()
        with running(_A_FOLDER, tmp_path) as (_, second):
            assert {*tmp_path.iterdir()} == {Path(first), Path(second), *others, link}
            assert all((folder / "file").exists() for folder in (*others, Path(first)))
