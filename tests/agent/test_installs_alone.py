"""Beside a training job the agent needs torch and what a plain `pip install` of this project brings: requests,
pydantic, typer and rich. What needs more says so in a sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

PLAIN = ("pydantic", "requests", "rich", "typer")
ROOT = Path(__file__).resolve().parents[2]
TRAINS = """
import sys
from functools import partial
import torch
from torch.nn import functional
from agent import Job, Reporter, ResilientTrainer
from agent.examples.own_job import build_stage, points

if __name__ == "__main__":
    result = ResilientTrainer(
        stages=build_stage, loss=functional.cross_entropy, data=points(), batch_size=4,
        optimizer=partial(torch.optim.AdamW, lr=1e-3), job=Job.uniform(2, 2, 2), kill=["W0_1@1:F0"],
    ).fit(iterations=3)
    Reporter(console="http://127.0.0.1:9", run="r", job=Job.uniform(1, 1, 1), worker="W0_0", iterations=1).close()
    print(len(result.losses), *(recovery.worker for recovery in result.recoveries), sorted(result.state_dict(0)))
    print(sorted({"numpy", "numba", "ortools", "typer", "rich", "streamlit"} & set(sys.modules)))
"""


def needs(name: str, found: set[str]) -> set[str]:
    """`name` and all that it requires, without extras, as far as it is installed."""
    if name in found:
        return found
    try:
        requirements = distribution(name).requires or []
    except PackageNotFoundError:
        return found
    found.add(name)
    for requirement in requirements:
        if "extra ==" not in requirement:
            match = re.match(r"[\w.-]+", requirement)
            assert match
            needs(match[0], found)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages, with those packages only."""
    folder = tmp_path_factory.mktemp("bare")
    names: set[str] = set()
    for name in ("torch", *PLAIN):
        needs(name, names)
    for name in names:
        installed = distribution(name)
        for part in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = folder / part
            if not link.exists():
                link.symlink_to(str(installed.locate_file(part)))
    return folder


def run(bare: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The interpreter without any site-packages but the bare ones."""
    interpreter = getattr(sys, "_base_executable", sys.executable)
    return subprocess.run(
        [interpreter, "-S", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=bare.parent,
        env={"PYTHONPATH": f"{bare}:{ROOT}", "PATH": ""},
    )


@pytest.mark.processes
def test_it_trains_through_a_death_and_reports(bare: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    done = run(bare, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3 W0_1 ['0.bias', '0.weight', '2.bias', '2.weight']", "[]"]


def test_reporting_needs_no_torch(bare: Path) -> None:
    done = run(bare, "-c", "import sys, agent.reporter; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


@pytest.mark.processes
def test_the_command_line_trains_through_a_death(bare: Path, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    grid = ("--pipelines", "2", "--stages", "2", "--micro-batches", "2", "--iterations", "3")
    task = ("--workload-options", '{"width": 32, "heads": 2, "sequence": 16, "batch": 2}')
    done = run(bare, "-m", "agent", "launch", *grid, *task, "--kill", "W0_1@1:F0", "--record", str(record))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["iteration"] for line in lines if "loss" in line] == [0, 1, 2]
    assert [line["failure"]["worker"] for line in lines if "failure" in line] == ["W0_1"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("planner", "plan"), "error: this needs numpy: pip install 'openrecycle[planner]'\n"),
        (("app", "serve"), "error: this needs sqlalchemy: pip install 'openrecycle[console]'\n"),
    ],
)
def test_what_needs_an_extra_says_which(bare: Path, arguments: tuple[str, ...], sentence: str) -> None:
    done = run(bare, "-m", *arguments)
    assert (done.returncode, done.stderr) == (2, sentence)


def test_what_pip_installs_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tuple(sorted(re.split(r"[<>=]", line)[0] for line in project["dependencies"])) == PLAIN
    pinned = {
        re.split(r"[\[=]", line)[0]
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    extras = {re.split(r"[\[<>=]", line)[0] for lines in project["optional-dependencies"].values() for line in lines}
    assert pinned - extras - {"torch", "openrecycle", *PLAIN} == set()
