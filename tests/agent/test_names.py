"""What may be a name, in the console's words and in those of whoever reads the published pattern."""

from __future__ import annotations

import json
import re
import sys
import unicodedata

import pytest
from pydantic import TypeAdapter, ValidationError

from openrecycle.agent.messages.protocol import JobSpec, Name

ADAPTER: TypeAdapter[str] = TypeAdapter(Name)


def taken(text: str) -> bool:
    try:
        ADAPTER.validate_python(text)
    except ValidationError:
        return False
    return True


@pytest.fixture(scope="module")
def characters() -> list[bool]:
    """Of every character: may it be a name?"""
    return [taken(chr(code)) for code in range(sys.maxunicode + 1)]


def test_the_pattern_means_the_same_to_every_reader(characters: list[bool]) -> None:
    """No class such as that of letters, which readers draw differently."""
    schema = JobSpec.model_json_schema()["properties"]["name"]
    pattern = json.loads(json.dumps(schema["pattern"]))
    assert not re.search(r"\\[wdsbpWDSBP]", pattern)
    published = re.compile(pattern, re.ASCII)
    for code, is_taken in enumerate(characters):
        assert is_taken == (published.search(chr(code)) is not None), hex(code)


def test_letters_of_every_script_are_taken_and_nothing_that_can_not_be_seen(characters: list[bool]) -> None:
    for code, is_taken in enumerate(characters):
        character = chr(code)
        kind = unicodedata.category(character)
        if kind[0] == "L" or kind in ("Nd", "Mn", "Mc", "Pc"):
            assert is_taken, hex(code)
        if kind in ("Cc", "Cs", "Co", "Zl", "Zp") or (kind == "Zs" and character != " "):
            assert not is_taken, hex(code)
    for hidden in "\u202e\u2066\u200e\u061c\ufeff\u00ad\n\x1b":
        assert not taken(f"a{hidden}b"), hex(ord(hidden))


@pytest.mark.parametrize("name", ["W\u0661_\u0661", "W1_\u0967", "W1_1\n"])
def test_numbers_of_workers_are_written_in_ascii(name: str) -> None:
    from openrecycle.agent.messages.protocol import WorkerName
    from openrecycle.planner.plans.plan import WorkerName as InPlans

    for kind in (WorkerName, InPlans):
        with pytest.raises(ValidationError):
            TypeAdapter(kind).validate_python(name)
