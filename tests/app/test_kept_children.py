"""Processes that are kept between questions: real ones, which are reused, end when idle, and may die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from openrecycle.app.kept_children import Answer, KeptChildren

PATIENCE = 120.0


def answerer() -> Answer:
    """Counts to the number that it is asked for, and says its process; `die` kills it."""

    def answer(question: bytes, wanted: Callable[[], bool]) -> Iterator[bytes]:
        if question == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        for i in range(int(question)):
            yield b"%d %d" % (i, os.getpid())

    return answer


class Heard:
    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.over = threading.Event()

    def take(self, message: bytes | None) -> None:
        if message is None:
            self.over.set()
        else:
            self.messages.append(message)

    @property
    def processes(self) -> set[bytes]:
        return {message.split()[1] for message in self.messages}


def ended(process: object) -> bool:
    deadline = time.monotonic() + PATIENCE
    while process.is_alive():  # type: ignore[attr-defined]
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_process_answers_one_question_after_the_other_and_another_one_beside_it() -> None:
    children = KeptChildren(answerer, name="counting")
    children.prepare()
    heard = [Heard(), Heard(), Heard()]
    children.ask(b"3", heard[0].take)
    assert heard[0].over.wait(PATIENCE)
    children.ask(b"20000", heard[1].take)
    children.ask(b"2", heard[2].take)
    assert heard[1].over.wait(PATIENCE) and heard[2].over.wait(PATIENCE)
    assert [len(h.messages) for h in heard] == [3, 20_000, 2]
    assert heard[0].processes == heard[1].processes != heard[2].processes
    children.close()


def test_what_is_not_wanted_any_more_says_nothing_more_and_its_process_goes_on() -> None:
    children = KeptChildren(answerer, name="counting")
    endless, next_one = Heard(), Heard()
    asked = children.ask(b"1000000000", endless.take)
    children.cancel(asked, soon=True)
    children.cancel(asked, soon=True)
    assert endless.over.is_set()
    heard = len(endless.messages)
    after = children.ask(b"4", next_one.take)
    assert next_one.over.wait(PATIENCE) and len(next_one.messages) == 4
    assert after.process is asked.process and len(endless.messages) <= heard + 1
    children.close()
    assert ended(after.process)


def test_one_that_dies_says_so_and_the_next_question_has_another() -> None:
    children = KeptChildren(answerer, name="counting")
    dead, alive = Heard(), Heard()
    asked = children.ask(b"die", dead.take)
    assert dead.over.wait(PATIENCE) and dead.messages == []
    assert ended(asked.process)
    children.ask(b"1", alive.take)
    assert alive.over.wait(PATIENCE) and len(alive.messages) == 1
    children.close()


def test_an_idle_one_is_ended_after_a_while() -> None:
    children = KeptChildren(answerer, name="counting", keep=0.0)
    heard = Heard()
    asked = children.ask(b"1", heard.take)
    assert heard.over.wait(PATIENCE) and len(heard.messages) == 1
    assert ended(asked.process)
    children.close()
