"""Each operation of the OpenAPI document with hundreds of requests: some ten thousand in all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.api_schema import api_in

EXAMPLES = 100
# Each of their requests is answered by a process of its own, which takes a second to start.
PROCESSES = ("GET /jobs/{job_id}/history.zip", "POST /history/import")


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
