"""The page for whoever adopts it (app/docs/adopt.md): each of its examples runs, with its kill."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from openrecycle.agent.config.options import TrainingOptions
from openrecycle.agent.jobs.preflight import check_workload
from openrecycle.planner.jobs.job import Job
from tests.agent.consoles import until
from tests.agent.node_runs import kill_group, lines
from tests.agent.runs import Run
from tests.conftest import at_length

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "app/docs/adopt.md").read_text()
SHOWN = ("plain_torch", "hugging_face_gpt2", "torch_stages")
GRID = ("--pipelines", "2", "--stages", "2", "--micro-batches", "4", "--iterations", "60")
TOKEN = "a secret of 20 signs"
PAGES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "app/docs").glob("*.md"))
PAGES += ["README.md", "DEVELOPMENT.md", "tests/security/README.md"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def environment(**more: str) -> dict[str, str]:
    """With the command `openrecycle`, of this clone."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    others = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OPENRECYCLE_"))}
    return others | {"PATH": path, "PYTHONPATH": f"{ROOT / '.src'}:{ROOT}"} | more


def address() -> str:
    """One of loopback's, where the port that the page names is free."""
    return f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}.{1 + secrets.randbelow(250)}"


def whole(folder: Path) -> Run:
    return Run(0, "", tuple(lines(folder)))


def same(hurt: Run, calm: Run) -> None:
    assert hurt.losses == calm.losses and hurt.final == calm.final
    assert "W1_1" in [failure["worker"] for failure in hurt.failures]


@contextmanager
def running(command: list[str], folder: Path, log: str, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """In a process group of its own, which is the node."""
    with (folder / log).open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder, env=env
        )
    try:
        yield process
    finally:
        kill_group(process)


def with_job(folder: Path) -> Path:
    """With the script that the page tells its reader to write."""
    (folder / "my_job.py").write_text(blocks("python")[-1])
    return folder


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What the job of the last three computes when nothing happens to it."""
    folder = with_job(tmp_path_factory.mktemp("calm"))
    command = ["openrecycle", "train", *GRID, "--workload", "my_job:workload", "--record", "run.jsonl"]
    with running(command, folder, "calm.log", environment()) as job:
        assert job.wait(100) == 0, (folder / "calm.log").read_text()
    run = whole(folder)
    assert float.fromhex(run.losses[-1]) < float.fromhex(run.losses[0])
    return run


# -- the page ---------------------------------------------------------------------------------------


def test_the_page_shows_what_is_run() -> None:
    files = [(ROOT / f"agent/examples/{name}.py").read_text().partition('"""\n\n')[2] for name in SHOWN]
    *shown, _ = blocks("python")
    assert shown == files


def test_each_is_short() -> None:
    found = [*blocks("python"), *blocks("bash"), *blocks("yaml")]
    assert len(found) == len(SHOWN) + 4
    assert [block for block in found if len(block.splitlines()) >= 40] == []


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)


@pytest.mark.parametrize("name", PAGES)
def test_its_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in re.findall(r"\]\(([^)]+)\)", without_code(page)):
        file, _, part = link.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.is_file(), link
        if part:
            headings = [line.lstrip("# ").lower() for line in without_code(other).splitlines() if line[:1] == "#"]
            assert part in [re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings], link


# -- on one machine ---------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("name", [at_length("plain_torch"), at_length("torch_stages"), "torchtitan_debug"])
def test_a_script_survives_its_kill(name: str, tmp_path: Path) -> None:
    """That of transformers has its test in test_from_transformers."""
    if name == "torchtitan_debug" and not all(map(importlib.util.find_spec, ("torchtitan", "spmd_types", "triton"))):
        pytest.skip("torchtitan is not installed")
    done = subprocess.run(
        [sys.executable, "-m", f"openrecycle.agent.examples.{name}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env=environment(PYTHONPATH=f"{ROOT / '.src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"),
    )
    assert done.returncode == 0, done.stderr
    assert "W1_1" in done.stdout
    numbers = list(map(float, re.findall(r"\d+\.\d+", done.stdout)))
    if name == "plain_torch":
        assert numbers[-1] > 0.85
    else:
        assert numbers[1] < 0.95 * numbers[0]


# -- on several -------------------------------------------------------------------------------------


def test_the_script_s_workload_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(with_job(tmp_path))
    script = importlib.import_module("my_job")
    assert check_workload(script.workload(), TrainingOptions(job=Job.uniform(2, 2, 4))).least


@pytest.mark.chaos
@pytest.mark.processes
def test_the_script_and_the_command_compute_the_same(calm: Run, tmp_path: Path) -> None:
    command = [sys.executable, "my_job.py"]
    with running(command, with_job(tmp_path), "script.log", environment()) as script:
        assert script.wait(100) == 0, (tmp_path / "script.log").read_text()
    assert (tmp_path / "script.log").read_text().split()[-1] == calm.final["parameters_sha256"]


@pytest.mark.chaos
@pytest.mark.processes
def test_several_nodes(calm: Run, tmp_path: Path) -> None:
    script, *_ = blocks("bash")
    env = environment(LEAD=address(), OPENRECYCLE_TOKEN=TOKEN)
    with_job(tmp_path)
    with (
        running(["bash", "-c", script], tmp_path, "lead.log", env | {"NODE": "0"}) as lead,
        running(["bash", "-c", script], tmp_path, "node.log", env | {"NODE": "1"}) as node,
    ):
        assert lead.wait(100) == 0, (tmp_path / "lead.log").read_text()
        assert node.wait(120) == 0, (tmp_path / "node.log").read_text()
    same(whole(tmp_path), calm)
    assert len(list((tmp_path / "weights").iterdir())) == 6


SRUN = """#!/usr/bin/env python3
# Starts the command once on each "node", as srun does, with what Slurm tells a task; waits for all of them.
import os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1 + next(n for n, word in enumerate(sys.argv[1:]) if not word.startswith("--")):]
assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(options), options
nodes = int(os.environ["SLURM_NNODES"])
step = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": str(nodes),
    "SLURM_STEP_NUM_TASKS": str(nodes),
    "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
    "SLURM_NTASKS": str(nodes),
}
tasks = [
    subprocess.Popen(command, env=os.environ | step | {"SLURM_NODEID": str(n), "SLURM_PROCID": str(n)})
    for n in range(nodes)
]
sys.exit(max(abs(task.wait()) for task in tasks))
"""


@pytest.mark.chaos
@pytest.mark.processes
def test_slurm(calm: Run, tmp_path: Path) -> None:
    """sbatch runs the script once, on the first node."""
    _, script = blocks("bash")
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.M))
    assert (
        script.startswith("#!/bin/bash\n") and asked["ntasks-per-node"] == "1" and {"no-kill", "requeue"} <= set(asked)
    )
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "srun").chmod(0o755)
    first = address()
    env = environment(SLURM_JOB_ID="17", SLURM_NNODES=asked["nodes"], SLURM_JOB_NODELIST=f"{first},node2")
    env["PATH"] = f"{tools}:{env['PATH']}"
    (with_job(tmp_path) / "train.sbatch").write_text(script)
    with running(["bash", "train.sbatch"], tmp_path, "slurm-17.out", env) as job:
        assert job.wait(150) == 0, (tmp_path / "slurm-17.out").read_text()
    (tmp_path / "run-17-0.jsonl").rename(tmp_path / "run.jsonl")
    same(whole(tmp_path), calm)
    assert sorted(path.name for path in (tmp_path / "saved-17").glob("[!.]*")) == [
        f"iteration-{n:010}" for n in (25, 50, 60)
    ]


# -- Kubernetes -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    (text,) = blocks("yaml")
    return {part["kind"]: part for part in yaml.safe_load_all(text)}


def test_the_manifest_s_parts_fit_each_other(manifest: dict[str, Any]) -> None:
    service, job = manifest["Service"], manifest["Job"]
    assert (service["apiVersion"], job["apiVersion"]) == ("v1", "batch/v1")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # The label that Kubernetes gives a job's pods; the names that it gives them; no address but theirs.
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == pod["subdomain"]
    assert job["spec"]["completionMode"] == "Indexed" and pod["restartPolicy"] == "OnFailure"
    nodes = container["command"][container["command"].index("--nodes") + 1]
    assert str(job["spec"]["completions"]) == str(job["spec"]["parallelism"]) == nodes
    (lead,) = (entry["value"] for entry in container["env"] if entry["name"] == "LEAD")
    assert lead.rpartition(":")[0] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    words = [*container["command"], *container["args"]]
    assert all(isinstance(word, str) for word in words), "the API takes strings alone"


def pod(manifest: dict[str, Any], index: int, host: str, saved: Path) -> tuple[list[str], dict[str, str]]:
    """Its command and environment, as the kubelet makes them. host: what the name of pod 0 stands for. saved: what is
    mounted."""
    (container,) = manifest["Job"]["spec"]["template"]["spec"]["containers"]
    own = {"JOB_COMPLETION_INDEX": str(index)}
    for entry in container["env"]:
        own[entry["name"]] = entry.get("value", TOKEN)
    own["LEAD"] = f"{host}:{own['LEAD'].rpartition(':')[2]}"
    (mount,) = container["volumeMounts"]
    words = [
        re.sub(r"\$\(([A-Z_]+)\)", lambda name: own[name[1]], word).replace(mount["mountPath"], str(saved))
        for word in (*container["command"], *container["args"])
    ]
    return words, environment(**own)


@pytest.mark.chaos
@pytest.mark.processes
def test_kubernetes(calm: Run, manifest: dict[str, Any], tmp_path: Path) -> None:
    """A worker is killed by the example, and then the whole of pod 1, which is started anew: its workers come back."""
    saved, host = with_job(tmp_path) / "saved", address()
    saved.mkdir()
    command, env = pod(manifest, 0, host, saved)
    # Slowly, so that there is a pod to kill; and with a record, as elsewhere on the page.
    command += ["--record", str(tmp_path / "run.jsonl"), "--pace", "F=15ms,I=15ms,W=15ms", "--restart-delay", "1"]
    other, its_env = pod(manifest, 1, host, saved)
    with (
        running(command, tmp_path, "pod-0.log", env) as lead,
        running(other, tmp_path, "pod-1.log", its_env) as first,
    ):
        until(lambda: whole(tmp_path).iterations, "an iteration", 100)
        # Sooner than Kubernetes: what it imports takes as long as the rest of the job. It has to wait for its place.
        with running(other, tmp_path, "pod-1-again.log", its_env) as again:
            until(lambda: len(whole(tmp_path).iterations) >= 22, "an iteration after the kill", 100)
            kill_group(first)
            assert lead.wait(100) == 0, (tmp_path / "pod-0.log").read_text()
            assert again.wait(120) == 0, (tmp_path / "pod-1-again.log").read_text()
    run = whole(tmp_path)
    same(run, calm)
    lost = [failure["worker"] for failure in run.failures]
    assert lost[0] == "W1_1" and "W1_0" in lost
    living = [line["living"] for line in run.iterations]
    assert living[0] == 4 and 2 in living and living[-1] == 4
    assert len(list((saved / "weights").iterdir())) == 6
