"""Each program and each of its commands: what is wrong on a command line is one sentence on stderr, and status 2."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from openrecycle.agent.cli import app as agent
from openrecycle.app.cli import cli as console
from openrecycle.planner.cli import app as planner


def commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


GRID = ("--pipelines", "2", "--stages", "2", "--micro-batches", "2")
EVERY = [
    words
    for name, program in (("agent", agent), ("app", console), ("planner", planner))
    for words in commands(typer.main.get_command(program), (name,))
]


def said(*words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """(status, stderr) of `python -m ...`"""
    monkeypatch.setattr(sys, "argv", [words[0], *words[1:]])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(words[0], run_name="__main__")
    return ended.value.code, capsys.readouterr().err


def test_there_are_commands_of_all_three() -> None:
    assert {words[0] for words in EVERY} == {"agent", "app", "planner"}
    assert len(EVERY) > 15 and ("app", "token", "create") in EVERY


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_an_unknown_option_is_one_sentence(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(*words, "--nonsense", monkeypatch=monkeypatch, capsys=capsys)
    assert status == 2
    assert text.startswith("error: No such option: --nonsense") and text.count("\n") == 1, text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("app", "serve", "--oidc-operators", "ada@x.org"), "--oidc-operators"),
        (("app", "serve", "--oidc-viewers", "ada@x.org"), "--oidc-viewers"),
        (("agent", "train", "--node-address", "10.0.0.5", "--iterations", "0"), "--node-address"),
        (
            ("agent", "profile", "--out", "p", "--model", "x", "--workload-options", '{"width": 8}'),
            "--workload-options",
        ),
        (("planner", "plan", *GRID, "--technique", ""), "--technique"),
    ],
)
def test_an_option_that_would_mean_nothing_is_named(
    words: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("openrecycle.app.server.serve", lambda settings: None)
    status, text = said(*words, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 2 and text.removeprefix("error: ").startswith(f"{named}: got "), text


@pytest.mark.parametrize(
    "words",
    [
        ("app", "sreve"),
        ("app", "serve", "--port", "eighty"),
        ("app", "serve", "--tolerance", "9"),
        ("app", "token", "revoke"),
        ("app", "token", "crate"),
        ("app", "delete"),
        ("planner", "paln"),
        ("planner", "plan", "--time-limit", "long"),
        ("agent", "lunch"),
        ("agent", "train", "--iterations", "many"),
    ],
    ids=" ".join,
)
def test_a_wrong_word_is_one_sentence(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(*words, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 2 and text.startswith("error: ") and text.count("\n") == 1, text


def test_an_example_that_is_started_without_its_arguments_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "openrecycle.agent.examples.own_loop"
    monkeypatch.delitem(sys.modules, name, raising=False)
    status, text = said(name, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 2 and text.rstrip().endswith("console, run, worker, shared"), text
