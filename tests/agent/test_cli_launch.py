"""`openrecycle train` refuses bad input in one sentence, before it starts anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from openrecycle.agent.cli import app
from tests.agent import wrong_jobs
from tests.golden import golden


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kill", "W9_9@1:F0"], ["--kill", "'W9_9'", "W0_0 to W2_3"]),
        (["--kill", "W1_2@30:F0"], ["--kill", "'W1_2@30:F0'", "0 to 29"]),
        (["--kill", "nonsense"], ["--kill", "'nonsense'", "W1_2@10:F3"]),
        (["--kill", "W0_1@1:F0", "--kill", "W1_1@2:F0", "--kill", "W2_1@3:F0"], ["stage 1", "--checkpoint"]),
        (["--stages", "0"], ["stages", "0", "at least 1"]),
        (["--micro-batches", "-3"], ["micro_batches", "-3"]),
        (["--iterations", "0"], ["--iterations", "0"]),
        (["--memory", "lots"], ["--memory", "'lots'", "uniform"]),
        (["--technique", "magic"], ["--technique", "'magic'", "staggered"]),
        (["--technique", "fault-free", "--kill", "W1_2@1:F0"], ["--technique", "fault-free"]),
        (["--pace", "F=fast"], ["--pace", "'F=fast'", "F=40ms"]),
        (["--pace", "F=40ms"], ["--pace", "I, W"]),
        (["--pace", "transfer=2ms"], ["--pace", "F, I, W"]),
        (["--pace", "profile"], ["--pace", "'profile'", "--profile too"]),
        (["--profile", "gpt-3-medium", "--pace", "F=1ms,I=1ms,W=1ms"], ["--pace", "profile, or nothing"]),
        (["--profile", "gpt-3-medium", "--stages", "30"], ["--stages", "30", "at most 24"]),
        (["--profile", "gpt-3-medium", "--memory", "bytes"], ["capacity_bytes", golden("bytes-per-worker")]),
        (
            ["--profile", "gpt-3-medium", "--memory", "bytes", "--capacity", "1GiB"],
            ["stage 0, which has 1,073,741,824"],
        ),
        (["--slow", "W1_2@3"], ["--slow", "'W1_2@3'", "W1_2@10:2"]),
        (["--slow", "W1_2@3:0", "--pace", "F=1ms,I=1ms,W=1ms"], ["--slow", "from 0.01 to 100"]),
        (["--slow", "W9_2@3:2"], ["--slow", "W0_0 to W2_3"]),
        (["--slow", "W1_2@3:2"], ["--slow", "--pace too"]),
        (["--capacity", "much"], ["--capacity", "'much'", "80GiB"]),
        (["--profile", "/no/such/file"], [golden("no-such-file-cant-be"), "gpt-3-6.7b"]),
        (["--profile", __file__], [golden("is-not-a-job-document")]),
        (["--console", "nowhere"], ["--console", "'nowhere'", "http://"]),
        (["--record", "/no/such/folder/run.jsonl"], ["--record", golden("folder-that-exists")]),
        (["--workload", "no.such:Model"], ["--workload", "no.such"]),
        (["--workload", "my_job"], ["--workload", "'my_job'", "my_job:workload"]),
        (["--partition", "1,2"], ["--partition: got '1,2'"]),
        (["--workload", "tests.agent.own_jobs:trainer"], ["--workload", "a ResilientTrainer without", "workload()"]),
        (["--workload", "tests.agent.own_jobs:workload"], ["--pipelines: got 3", "2, as"]),
        (["--workload", "tests.agent.own_jobs:workload", "--pipelines", "2"], ["--micro-batches: got 6", "3, as"]),
        (["--workload-options", "[1]"], ["--workload-options", "JSON object"]),
        (["--workload-options", '{"heads": 3}'], ["--workload-options", golden("multiple-of-heads")]),
        (["--rejoin", "W1_2@3"], ["--rejoin", "--kill"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--token-file", "/no/such/file"], ["--token-file"]),
        (["--token-file", __file__], ["--token-file", "--nodes"]),
        (
            ["--evaluate-every", "5", "--workload", "openrecycle.agent.examples.own_workload:Points"],
            ["--evaluate-every"],
        ),
        (["--stages", "2", "--relayout", "always", "--profile", "gpt-3-medium", "--dry-run"], ["--relayout"]),
        (["--weights", __file__], ["--weights", "expected a folder"]),
        (["--transfer-timeout", "20"], ["--transfer-timeout", "20.0", golden("more-than-the-20-s")]),
        (["--transfer-timeout", "200"], ["--group-timeout", "150.0", "--transfer-timeout (200 s)"]),
        (["--bucket-cap-mb", "0"], ["--bucket-cap-mb", "0"]),
        (["--group-timeout", "0"], ["--group-timeout", "0.0", "more than 0 seconds"]),
    ],
)
def test_bad_input(arguments: list[str], words: list[str]) -> None:
    done = CliRunner().invoke(app, ["train", *arguments])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert done.stdout == ""


def test_an_error_of_the_users_code_is_told_with_its_line() -> None:
    grid = ["--pipelines", "1", "--stages", "2", "--micro-batches", "2", "--iterations", "1", "--dry-run"]
    done = CliRunner().invoke(app, ["train", *grid, "--workload", "tests.agent.wrong_jobs:RaisingLoss"])
    place = f"{wrong_jobs.__file__}:{wrong_jobs.RaisingLoss.loss.__code__.co_firstlineno + 1} in loss"
    assert done.exit_code == 2 and place in done.stderr, done.output


def test_a_dry_run_says_what_it_takes_and_trains_nothing(tmp_path: Path) -> None:
    arguments = ["--pipelines", "1", "--stages", "2", "--micro-batches", "2", "--iterations", "1", "--dry-run"]
    folder = tmp_path / "weights"
    done = CliRunner().invoke(app, ["train", *arguments, "--weights", str(folder)])
    assert done.exit_code == 0 and " MB" in done.stderr, done.output
    assert done.stdout == "" and not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--nodes", "1", "--node-address", "127.0.0.1"], {}),
        ([], {"SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1"}),
        ([], {"TORCHELASTIC_RUN_ID": "0", "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "1"}),
    ],
)
def test_a_command_for_several_nodes_runs_on_one(
    arguments: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    job = ["--pipelines", "1", "--stages", "2", "--micro-batches", "2", "--iterations", "1", "--dry-run"]
    done = CliRunner(env=environment).invoke(app, ["train", *job, "--token-file", str(token), *arguments])
    assert done.exit_code == 0, done.output


@pytest.mark.processes
def test_as_a_user_sees_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent", "train", "--kill", "W9_9@1:F0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --kill: got 'W9_9',") and done.stderr.count("\n") == 1
