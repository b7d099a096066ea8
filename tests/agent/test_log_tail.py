"""The newest lines of a worker, bounded, and without what a page could not show."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import sys
from pathlib import Path

import pytest

from openrecycle.agent.messages.client import Followed, LogTail
from openrecycle.agent.messages.protocol import LOG_LINE, LOG_LINES


def texts(tail: LogTail) -> list[str]:
    return [line.text for line in tail.take()[0]]


def test_lines_are_taken_once() -> None:
    tail = LogTail()
    tail.add("one\ntwo\n\n")
    lines, skipped = tail.take()
    assert [line.text for line in lines] == ["one", "two"] and skipped == 0
    assert lines[0].at <= lines[1].at
    assert tail.take() == ((), 0)


def test_the_oldest_give_way_and_are_counted() -> None:
    tail = LogTail()
    for i in range(LOG_LINES + 7):
        tail.add(str(i))
    lines, skipped = tail.take()
    assert skipped == 7 and [line.text for line in lines] == [str(i) for i in range(7, LOG_LINES + 7)]
    tail.add("again")
    assert tail.take()[1] == 0


def test_what_did_not_arrive_comes_first_next_time() -> None:
    tail = LogTail()
    tail.add("\n".join(map(str, range(LOG_LINES + 2))))
    lines, skipped = tail.take()
    tail.add("one\ntwo")
    tail.put_back(lines, skipped)
    again, missing = tail.take()
    assert [line.text for line in again] == [*map(str, range(4, LOG_LINES + 2)), "one", "two"] and missing == 4


def test_what_is_too_long_or_unprintable_is_cut_and_marked() -> None:
    tail = LogTail()
    tail.add("x" * (LOG_LINE + 1))
    tail.add("bell\a and \x00")
    assert texts(tail) == ["x" * LOG_LINE, "bell\N{REPLACEMENT CHARACTER} and \N{REPLACEMENT CHARACTER}"]


def test_nothing_that_is_written_to_a_full_disk_raises() -> None:
    tail, lost = LogTail(), list[OSError]()
    with Path("/dev/full").open("w") as full:
        out = Followed(full, tail, lost.append)
        for _ in range(3):
            print("x" * 9000, file=out, flush=True)
        out.writelines(["one\n", "two\n"])
        out.flush()
        assert [error.errno for error in lost] == [errno.ENOSPC]
        assert texts(tail)[-2:] == ["one", "two"]
        with contextlib.suppress(OSError):
            full.close()


def test_a_followed_stream_writes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    out, tail = io.StringIO(), LogTail()
    monkeypatch.setattr(sys, "stdout", Followed(out, tail))
    print("a", "line")
    print("half a ", end="")
    assert texts(tail) == ["a line"]
    print("line", flush=True)
    assert texts(tail) == ["half a line"]
    assert out.getvalue() == "a line\nhalf a line\n"
    assert sys.stdout.isatty() is False, "all else is the stream's own"
    handler = logging.StreamHandler(sys.stdout)
    handler.emit(logging.LogRecord("x", logging.WARNING, "", 1, "logged", None, None))
    assert texts(tail) == ["logged"]
    print("y" * (LOG_LINE + 1), end="")
    assert texts(tail) == ["y" * LOG_LINE], "a line that never ends does not pile up"
