"""Each attack of tests.security.attacks on a console of its own kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.app.console_server import ConsoleServer
from tests.security.attacks import GUARDED, OPEN, Attack, console

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("attacks"), pytest.mark.processes]


@pytest.fixture(scope="module")
def without_token() -> Iterator[ConsoleServer]:
    with console(guarded=False) as server:
        yield server


@pytest.fixture(scope="module")
def with_token() -> Iterator[ConsoleServer]:
    with console(guarded=True) as server:
        yield server


@pytest.mark.parametrize("attack", OPEN, ids=lambda attack: attack.__name__)
def test_without_a_token(attack: Attack, without_token: ConsoleServer) -> None:
    assert attack(without_token)


@pytest.mark.parametrize("attack", GUARDED, ids=lambda attack: attack.__name__)
def test_with_a_token(attack: Attack, with_token: ConsoleServer) -> None:
    assert attack(with_token)
