"""What `pip install` of this project brings: one package, which trains beside torch with cryptography, numpy,
pydantic, requests, rich, safetensors and typer alone. What needs more says so in a sentence, and with it does all, far
from the clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import requests

from openrecycle.app.cli import cli as console
from openrecycle.cli import HISTORY
from tests.golden import golden

pytestmark = pytest.mark.processes

PLAIN = ("cryptography", "numpy", "pydantic", "requests", "rich", "safetensors", "typer")
ROOT = Path(__file__).resolve().parents[2]
TRAINS = """
import sys
from functools import partial
import torch
from torch.nn import functional
from openrecycle import Data, Faults, Job, Model, Reporter, ResilientTrainer
from openrecycle.agent.examples.own_job import build_layer, points

if __name__ == "__main__":
    result = ResilientTrainer(
        model=Model(layers=build_layer, layer_count=4, loss=functional.cross_entropy),
        data=Data(points(), batch_size=4),
        optimizer=partial(torch.optim.AdamW, lr=1e-3), job=Job.uniform(2, 2, 2), faults=Faults(kill=["W0_1@1:F0"]),
    ).fit(iterations=3)
    Reporter(console="http://127.0.0.1:9", run="r", job=Job.uniform(1, 1, 1), worker="W0_0", iterations=1).close()
    print(len(result.losses), *(recovery.worker for recovery in result.recoveries), sorted(result.state_dict(0)))
    print(sorted({"numba", "ortools", "typer", "rich", "streamlit"} & set(sys.modules)))
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This project's wheel, built from the clone's tracked and new files."""
    clone, folder = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("wheel")
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")):
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    # Without isolation: nothing is downloaded.
    build = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(clone))
    subprocess.run([sys.executable, "-m", "pip", "-q", *build], check=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """An environment in which the wheel was installed by `pip install`, beside torch. What the wheel requires is not
    downloaded: it is linked to."""
    folder, required = tmp_path_factory.mktemp("bare"), tmp_path_factory.mktemp("required")
    interpreter = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([interpreter, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    installs = ("--python", str(folder), "-q", "install", "--no-deps", "--no-index", str(wheel))
    subprocess.run([sys.executable, "-m", "pip", *installs], check=True, timeout=120)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "required.pth").write_text(f"{required}\n")
    names: set[str] = set()
    for name in ("torch", *PLAIN):
        needs(name, names)
    for name in names:
        installed = distribution(name)
        for part in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = required / part
            if not link.exists():
                link.symlink_to(str(installed.locate_file(part)))
    return folder


def run(bare: Path, *arguments: str, more: str = "") -> subprocess.CompletedProcess[str]:
    """Of that environment `python` (where the arguments begin with an option or a script) or the command, in a folder
    far from the clone. more: another folder of packages."""
    program = "openrecycle" if arguments[0].isalpha() else "python"
    return subprocess.run(
        [str(bare / "bin" / program), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=bare.parent,
        env={"PYTHONPATH": more, "PATH": ""},
    )


@pytest.mark.processes
def test_it_trains_through_a_death_and_reports(bare: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    done = run(bare, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3 W0_1 ['0.bias', '0.weight', '2.bias', '2.weight']", "[]"]


@pytest.mark.processes
def test_reporting_needs_no_torch(bare: Path) -> None:
    done = run(bare, "-c", "import sys, openrecycle.agent.own_loops.reporter; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


@pytest.mark.chaos
@pytest.mark.processes
def test_the_command_line_trains_through_a_death(bare: Path, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    grid = ("--pipelines", "2", "--stages", "2", "--micro-batches", "2", "--iterations", "3")
    task = ("--workload-options", '{"width": 32, "heads": 2, "sequence": 16, "batch": 2}')
    done = run(bare, "train", *grid, *task, "--kill", "W0_1@1:F0", "--record", str(record))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["iteration"] for line in lines if "loss" in line] == [0, 1, 2]
    assert [line["failure"]["worker"] for line in lines if "failure" in line] == ["W0_1"]


@pytest.mark.processes
def test_the_command_line_plans_and_checks(bare: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    grid = ("--pipelines", "2", "--stages", "2", "--micro-batches", "4", "--fail", "W0_1")
    made = run(bare, "plan", *grid, "--out", str(plan))
    assert (made.returncode, made.stderr) == (0, "")
    assert "is valid" in run(bare, "check", str(plan)).stdout


@pytest.mark.processes
def test_what_needs_an_extra_says_which(bare: Path) -> None:
    done = run(bare, "serve")
    sentence = "error: this needs sqlalchemy: pip install '<clone of OpenReCycle>[console]'\n"
    assert (done.returncode, done.stderr) == (2, sentence)


@pytest.mark.processes
def test_training_without_torch_says_so(bare: Path, tmp_path: Path) -> None:
    # Absent in the server that workers are forked from, too: it would import it for nothing.
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    done = run(bare, "train", more=str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(golden("error-this-needs-torch"))


def test_what_pip_installs_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tuple(sorted(re.split(r"[<>=]", line)[0] for line in project["dependencies"])) == PLAIN
    pinned = {
        re.split(r"[\[=]", line)[0]
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if line and not line.startswith(("#", "-"))
    }
    extras = {re.split(r"[\[<>=]", line)[0] for lines in project["optional-dependencies"].values() for line in lines}
    assert pinned - extras - {"torch", "openrecycle", *PLAIN} == set()


@pytest.mark.processes
@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2), (["serve"], 2)])
def test_history_has_three_commands_and_lists_no_others(arguments: list[str], status: int) -> None:
    code = "import sys; sys.argv[0] = 'openrecycle'; from openrecycle.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "history", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT / ".src")},
    )
    assert done.returncode == status
    listed = (done.stdout or done.stderr).replace("'serve'", "")
    assert all(command in listed for command in HISTORY)
    assert not any(command in listed for command in ("serve", "demo", "token"))
    assert set(HISTORY) <= {command.name for command in console.registered_commands}


@pytest.mark.processes
def test_the_wheel_has_one_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert {name.partition("/")[0].partition("-")[0] for name in archive.namelist()} == {"openrecycle"}
        (scripts,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "openrecycle = openrecycle.cli:main" in archive.read(scripts).decode()


ALL = """
import json, sys, threading, urllib.request
from pathlib import Path
sys.argv = ["openrecycle", *sys.argv[1:]]
from openrecycle.cli import main
try:
    main()
finally:
    files = [getattr(m, "__file__", None) or "" for m in list(sys.modules.values())]
    files = [f for f in files if "openrecycle" in f]
    assert len({Path(f).resolve() for f in files}) == len(files)
    print([name for name in ("agent", "app", "db", "planner") if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.processes
def test_with_the_extras_it_plans_checks_and_serves(bare: Path, tmp_path: Path) -> None:
    packages = sysconfig.get_path("purelib")
    plan = tmp_path / "plan.json"
    grid = ("--pipelines", "3", "--stages", "4", "--micro-batches", "6", "--memory", "none")
    made = run(bare, "-c", ALL, "plan", *grid, "--fail", "W1_2", "--out", str(plan), more=packages)
    assert (made.returncode, made.stderr) == (0, "[]\n")
    assert "is valid" in run(bare, "-c", ALL, "check", str(plan), more=packages).stdout
    serving = subprocess.Popen(
        [str(bare / "bin" / "openrecycle"), "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=bare.parent,
        env={"PYTHONPATH": packages, "PATH": "", "DATABASE_URL": f"sqlite:///{tmp_path}/console.db"},
    )
    try:
        assert serving.stdout is not None
        address = next(found[0] for line in serving.stdout if (found := re.search(r"http://[0-9.:]+", line)))
        ready = requests.get(f"{address}/readyz", timeout=60)
        page = requests.get(f"{address}/schedule", timeout=60)
        assert (ready.status_code, page.status_code) == (200, 200)
    finally:
        serving.terminate()
        assert serving.wait(60) == 0
