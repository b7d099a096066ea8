"""What comes through a pipe, handed on in a thread."""

from __future__ import annotations

import queue
import threading
from multiprocessing import Pipe

import pytest

from openrecycle.agent.messages.channel import follow


def test_messages_are_handed_on_in_order_until_the_other_end_is_gone() -> None:
    here, there = Pipe()
    heard, ended = list[bytes](), threading.Event()
    follow(here.recv_bytes, heard.append, ended.set, name="reader")
    outbox, sent = queue.SimpleQueue[bytes | None](), threading.Event()
    follow(outbox.get, there.send_bytes, sent.set, name="writer")
    for message in (b"1", b"2", b"3", None):
        outbox.put(message)
    assert sent.wait(60) and not ended.is_set(), "the writer ends at None"
    there.close()
    assert ended.wait(60) and heard == [b"1", b"2", b"3"]


def test_where_handing_on_fails_that_is_printed_and_it_ends(capfd: pytest.CaptureFixture[str]) -> None:
    here, there = Pipe()
    ended = threading.Event()
    follow(here.recv_bytes, {}.pop, ended.set, name="reader")
    there.send_bytes(b"unknown")
    assert ended.wait(60) and "KeyError" in capfd.readouterr().err
