"""Each operation of the OpenAPI document, with a few requests; `make chaos` makes thousands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from api_schema import Api

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    from api_schema import api_in  # imports Schemathesis, for which no other test has a use

    with api_in(tmp_path_factory.mktemp("schema"), few_characters=True) as api:
        yield api


def test_every_operation_answers_as_documented(api: Api) -> None:
    labels = api.operations()
    assert len(labels) > 50
    made = sum(api.call(label, 1, negative=False) for label in labels)
    assert made > 20
    assert 200 in api.seen
    assert max(api.seen) < 500, api.seen


def test_every_answer_is_documented(api: Api) -> None:
    document = api.schema.raw_schema
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            assert {"4XX", "5XX"} <= set(answers), (method, path)
            assert any(status.startswith("2") for status in answers), (method, path)
            assert operation["tags"], (method, path)
            for status in ("4XX", "5XX"):
                assert list(answers[status]["content"]) == ["application/problem+json"], (method, path)
            # FastAPI would answer with its own errors where it is not told better.
            assert "422" not in answers or "problem+json" in str(answers["422"])
