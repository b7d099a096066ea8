"""Each operation of the OpenAPI document with hundreds of requests: some ten thousand in all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.api_schema import api_in

EXAMPLES = 100


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("negative", [False, True])
def test_every_operation_answers_as_documented(tmp_path: Path, negative: bool) -> None:
    with api_in(tmp_path) as api:
        labels = api.operations()
        made = sum(api.call(label, EXAMPLES, negative=negative) for label in labels)
        assert made > (20 if negative else 50) * EXAMPLES
        assert max(api.seen) < 500, api.seen
