"""Each attack of tests.security.attacks on a console of its own kind."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.app.console_server import ConsoleServer
from tests.security import attacks
from tests.security.attacks import GUARDED, OPEN, Attack, a_head_that_drips, answers_that_are_not_read, console

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("attacks"), pytest.mark.processes]

WAITING = (a_head_that_drips, answers_that_are_not_read)


def test_help_starts_no_console(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["attacks", "--help"])
    monkeypatch.setattr(attacks, "console", None)
    with pytest.raises(SystemExit) as ended:
        attacks.main()
    assert ended.value.code == 0 and "tests.security.attacks" in capsys.readouterr().out


@pytest.fixture(scope="module")
def without_token() -> Iterator[ConsoleServer]:
    with console(guarded=False) as server:
        yield server


@pytest.fixture(scope="module")
def with_token() -> Iterator[ConsoleServer]:
    with console(guarded=True) as server:
        yield server


@pytest.mark.parametrize("attack", [a for a in OPEN if a not in WAITING], ids=lambda attack: attack.__name__)
def test_without_a_token(attack: Attack, without_token: ConsoleServer) -> None:
    assert attack(without_token)


@pytest.mark.chaos
def test_those_that_wait_for_a_limit(without_token: ConsoleServer) -> None:
    """Beside each other."""
    with ThreadPoolExecutor(len(WAITING)) as pool:
        assert all(pool.map(lambda attack: attack(without_token), WAITING))


@pytest.mark.parametrize("attack", GUARDED, ids=lambda attack: attack.__name__)
def test_with_a_token(attack: Attack, with_token: ConsoleServer) -> None:
    assert attack(with_token)
