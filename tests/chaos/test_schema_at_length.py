"""Each operation of the OpenAPI document with hundreds of requests: some ten thousand in all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.api_schema import RELATIONS, api_in, linked

EXAMPLES = 100
# Of the phase in which one request follows from another's answer, for each operation.
STATEFUL_EXAMPLES = 300
# Operations that follow from others' answers, of 72, by what is sent: right requests, wrong ones, or both. From wrong
# ones alone, which are refused, little follows.
FOLLOWING = {"positive": 30, "negative": 10, "all": 30}
_LOOSE = "checks.positive_data_acceptance.enabled = false"
# Each file with a history is made by a process of its own, which takes a second to start.
LEFT_OUT = "history\\.zip$"
PROCESSES = ("GET /jobs/{job_id}/history.zip",)


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("negative", [False, True])
def test_every_operation_answers_as_documented(tmp_path: Path, negative: bool) -> None:
    made, wrong = 0, list[BaseException]()
    with api_in(tmp_path) as api:
        for label in api.operations():
            try:
                made += api.call(label, EXAMPLES // 5 if label in PROCESSES else EXAMPLES, negative=negative)
            except (
                Exception,
                BaseExceptionGroup,
            ) as error:  # Schemathesis raises groups; the others are tried all the same: a run takes minutes
                error.add_note(f"operation: {label}")
                wrong.append(error)
        if wrong:
            raise BaseExceptionGroup(f"{len(wrong)} operations do not answer as documented", wrong)
        assert made > (20 if negative else 50) * EXAMPLES
        assert max(api.seen) < 500, api.seen


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("mode", list(FOLLOWING))
def test_requests_that_follow_from_answers_run_to_their_end(tmp_path: Path, mode: str) -> None:
    """Schemathesis' own command, as whoever tests the API from outside runs it. What relations between fields refuse,
    which JSON Schema has no words for (api_schema.RELATIONS), is not held against it."""
    loose = "".join(f'[[operations]]\ninclude-name = "{label}"\n{_LOOSE}\n' for label in RELATIONS)
    (tmp_path / "schemathesis.toml").write_text(loose)
    with api_in(tmp_path) as api:
        (tmp_path / "openapi.json").write_text(json.dumps(linked(api.schema.raw_schema)))
        command = [str(Path(sys.executable).with_name("st"))]
        command += ["--config-file", "schemathesis.toml", "run", "openapi.json", "--url", f"{api.root}/api/v1"]
        command += ["--phases", "stateful", "--mode", mode, "--max-examples", str(STATEFUL_EXAMPLES)]
        command += ["--exclude-path-regex", LEFT_OUT]
        command += ["--seed", "1", "--request-timeout", "120", "--suppress-health-check", "all"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3_000)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert "No issues found" in done.stdout, done.stdout[-2_000:]
    tested = re.search(r"Tested: ([0-9]+)", done.stdout)
    assert tested and int(tested[1]) >= FOLLOWING[mode], done.stdout[-2_000:]
