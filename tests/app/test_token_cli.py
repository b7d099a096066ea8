"""`openrecycle token`: what it prints, what it refuses, and that a console that runs knows of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from openrecycle.app.cli import cli
from openrecycle.app.security.access import Tokens
from openrecycle.db.access import AuditStore, TokenStore
from openrecycle.db.session import Database
from tests.golden import golden


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'console.db'}"


def run(url: str, *arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli, ["token", *arguments, "--database-url", url])
    return done.exit_code, done.stdout.strip(), done.stderr.strip()


def test_a_token_from_making_to_revoking(url: str) -> None:
    status, text, said = run(url, "create", "--role", "operate", "--name", "ada", "--days", "30")
    assert (status, text.startswith("orc_")) == (0, True)
    assert golden("ada-may-look-at-everything", url) in said
    assert golden("not-shown-again") in said
    token_id = text.split("_")[1]
    status, table, _ = run(url, "list")
    assert status == 0
    assert token_id in table
    assert text.split("_", 2)[2] not in table
    database = Database(url)
    tokens = Tokens(TokenStore(database))
    assert tokens.look_up(text) is not None
    assert run(url, "revoke", token_id) == (0, "", f"'ada' ({token_id}) is revoked")
    tokens.refresh()
    assert tokens.check(text) is None
    assert "revoked" in run(url, "list")[1]
    lines = AuditStore(database).read()
    assert [(line["action"], line["target"], line["detail"]) for line in lines] == [
        ("create token", token_id, "ada"),
        ("revoke token", token_id, "ada"),
    ]
    assert all(line["actor"].endswith("command line") for line in lines)
    database.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "--role", "boss"), "--role: got 'boss',"),
        (("create", "--role", "agent", "--job", "x"), "--job: got 'x',"),
        (("create", "--role", "view", "--days", "0"), "--days: got 0,"),
        (("revoke", "nope"), "token: got 'nope',"),
    ],
)
def test_what_is_refused(url: str, arguments: tuple[str, ...], words: str) -> None:
    Database(url).close()
    status, out, said = run(url, *arguments)
    assert (status, out) == (2, "")
    assert words in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("command", ["token list", "token revoke x", "export --job x --out x.zip", "delete --job x"])
def test_what_looks_for_something_makes_no_database(command: str, tmp_path: Path) -> None:
    path = tmp_path / "mistyped" / "console.db"
    done = CliRunner().invoke(cli, [*command.split(), "--database-url", f"sqlite:///{path}"])
    assert done.exit_code == 2 and str(path) in done.stderr and not path.parent.exists()


def test_a_database_that_can_not_be_used() -> None:
    status, _, said = run("mysql://a:secret@b/c", "list")
    assert status == 2
    assert "got a mysql database" in said
    assert "secret" not in said


@pytest.mark.parametrize("arguments", [("create", "--role", "view", "--name", "\udcff"), ("revoke", "\udcff")])
def test_text_that_is_not_utf_8_is_refused_in_a_sentence(url: str, arguments: tuple[str, ...]) -> None:
    assert run(url, "create", "--role", "view")[0] == 0
    status, out, said = run(url, *arguments)
    assert (status, out) == (2, "") and "udcff" in said and len(said.splitlines()) == 1
