"""The sentences that tests expect, all in wording.json: whoever words one better edits no test.

A test names one: `assert golden("all-workers-are-gone") in error`. What is there for `match=` is a pattern.
`pytest --golden -n 0` writes the words that were found into the file where a comparison by == or `in` finds others; of
all other sentences the failing test shows what there is now.
`python -m tests.golden` moves sentences there that asserts and parameters quote.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from openrecycle.planner.jobs.words import MIGRATE, STAND_BY

FILE = Path(__file__).with_name("wording.json")
ROOT = Path(__file__).resolve().parents[2]
_NAMES = {MIGRATE, STAND_BY}
"""Are values of the API, as a code is."""


class Sentence(str):
    """A sentence, with the name that it has in the file."""

    name: str


@functools.cache
def wording() -> dict[str, str]:
    return dict(json.loads(FILE.read_text()))


def golden(name: str, *values: Any) -> Sentence:
    """The sentence of that name, with `values` in its places {0}, {1} and so on."""
    sentence = wording()[name]
    made = Sentence(sentence.format(*values) if values else sentence)
    made.name = name
    return made


def write(sentences: dict[str, str]) -> None:
    FILE.write_text(json.dumps(dict(sorted(sentences.items())), indent=0, ensure_ascii=False) + "\n")


def learn(operator: str, left: object, right: object) -> None:
    """From a comparison that failed: the file takes up what there was instead."""
    expected, found = (left, right) if isinstance(left, Sentence) else (right, left)
    if operator not in ("==", "in") or not isinstance(expected, Sentence) or "{0}" in wording()[expected.name]:
        return
    texts = [found] if isinstance(found, str) else list(found) if isinstance(found, (list, tuple, set)) else []
    if operator == "in":
        texts = [part for text in texts if isinstance(text, str) for part in _parts(text, len(expected.split(" ")))]
    (best,) = difflib.get_close_matches(expected, [t for t in texts if isinstance(t, str)], 1, 0.4) or (None,)
    if best is not None:
        wording()[expected.name] = best
        write(wording())


def _parts(text: str, words: int) -> list[str]:
    """Of about so many words, of one line each."""
    lines = [line.split(" ") for line in text.splitlines()]
    lengths = range(max(1, words - 2), words + 3)
    return [" ".join(line[at : at + n]) for line in lines for n in lengths for at in range(max(1, len(line) - n + 1))]


# -- what tests quote ------------------------------------------------------------------------


def _runs(text: str) -> set[tuple[str, ...]]:
    """Three words, each after the other with a space between."""
    return {
        tuple(words[n : n + 3]) for piece in re.split(r"[^A-Za-z' ]", text) for words in [piece.split()] for n in
        range(len(words) - 2)
    }  # fmt: skip


@functools.cache
def _product() -> set[tuple[str, ...]]:
    """Of all that the product may say."""
    found: set[tuple[str, ...]] = set()
    for folder in ("agent", "app", "db", "planner", ".src/openrecycle"):
        for path in (ROOT / folder).rglob("*.py"):
            # Half as long as to walk through its tree.
            for text in _strings(compile(path.read_text(), path, "exec", dont_inherit=True)):
                found |= _runs(text)
    return found


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, frozenset, CodeType)):
        for inner in value.co_consts if isinstance(value, CodeType) else value:
            yield from _strings(inner)


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """As ast.walk, but for the order, in half the time."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for value in map(vars(node).get, node._fields):
            if isinstance(value, ast.AST):
                left.append(value)
            elif isinstance(value, list):
                left += [each for each in value if isinstance(each, ast.AST)]


def quoted(source: str) -> Iterator[ast.Constant | ast.JoinedStr]:
    """The sentences of the product in the asserts of a test, in its `match=`, and in its parameters."""
    for node in walk(ast.parse(source)):
        call = node if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize" else None
        if call is not None and ast.unparse(call.func) == "pytest.mark.parametrize":
            for argument in call.args:
                yield from _sentences(argument)
        if isinstance(node, ast.Assert):
            yield from _sentences(node.test)
        elif isinstance(node, ast.keyword) and node.arg == "match":
            yield from _sentences(node.value)


def _sentences(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    if isinstance(node, ast.JoinedStr):
        if any(isinstance(p, ast.Constant) and isinstance(p.value, str) and _of_product(p.value) for p in node.values):
            yield node
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str) and _of_product(node.value):
            yield node
    else:
        for child in ast.iter_child_nodes(node):
            yield from _sentences(child)


def _of_product(text: str) -> bool:
    return text not in _NAMES and bool(_runs(text) & _product())
