"""Child processes of the console: what they begin with, what becomes of their answers, and how they end."""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from pathlib import Path
from types import ModuleType

import pytest

from openrecycle.app.runtime.errors import ConsoleError
from openrecycle.app.runtime.patches import begin_without_pages
from openrecycle.app.runtime.processes import Channel, ChildEnded, Children, PendingAnswer
from openrecycle.planner.jobs.errors import InfeasibleError, InputError

pytestmark = pytest.mark.processes

PAGES = Path(__file__).resolve().parents[2] / "app" / "ui"
TIMEOUT = 120.0


def tell(channel: Channel) -> None:
    """The child: which packages it finds, and what it has run."""
    import openrecycle.planner.jobs.errors

    channel.say(
        f"{openrecycle.planner.jobs.errors.__file__} {str(PAGES) in sys.path} {'streamlit' in sys.modules}".encode()
    )


@pytest.mark.processes
def test_a_child_neither_runs_the_page_nor_looks_for_packages_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ModuleType("__main__")  # what Streamlit puts there, and leaves there
    page.__file__ = str(PAGES / "main.py")
    monkeypatch.setitem(sys.modules, "__main__", page)
    monkeypatch.syspath_prepend(str(PAGES))
    begin_without_pages()
    (said,) = Children(tell, name="tell").ask(timeout=TIMEOUT)
    found, in_path, streamlit = said.decode().split()
    assert Path(found).resolve() == PAGES.parents[1] / "planner" / "jobs" / "errors.py"
    assert (in_path, streamlit) == ("False", "False")


def hungry(channel: Channel, size: int) -> None:
    """The child: takes as much memory as it is asked to. Below 0 it ends as Rust does when it gets none."""
    if size < 0:
        os.abort()
    channel.say(b"%d" % len(bytearray(size)))


@pytest.mark.processes
def test_a_child_takes_no_more_memory_than_it_may() -> None:
    children = Children(hungry, name="hungry", memory=256 << 20)
    assert children.ask(64 << 20, timeout=TIMEOUT) == [b"%d" % (64 << 20)]
    for size in (512 << 20, -1):
        with pytest.raises(ConsoleError, match="memory") as refused:
            children.ask(size, timeout=TIMEOUT)
        assert refused.value.code == "too_large", "to try again can't help"
    with pytest.raises(ConsoleError, match="memory") as refused:
        Children(hungry, name="hungry").ask(-1, timeout=TIMEOUT)
    assert refused.value.code == "unavailable", "the machine may have more later"


def count(channel: Channel, to: int) -> None:
    """The child: counts, and says its process. Below 0 it dies, at 0 it fails."""
    if to < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if to == 0:
        raise RuntimeError("it fails")
    for i in range(to):
        if not channel.wanted():
            return
        channel.say(b"%d %d" % (i, os.getpid()))


def ended(asked: PendingAnswer) -> bool:
    return asked.ended(TIMEOUT)


def processes(messages: list[bytes]) -> set[bytes]:
    return {message.split()[1] for message in messages}


@pytest.mark.processes
def test_all_who_wait_for_a_process_see_it_end() -> None:
    children = Children(count, name="counting")
    with ThreadPoolExecutor(8) as waiting:
        for _ in range(5):
            asked = children.begin(1)
            seen = [waiting.submit(asked.ended, TIMEOUT) for _ in range(8)]
            os.kill(asked.process.pid or 0, signal.SIGKILL)
            assert all(future.result() for future in seen)
            with pytest.raises(ChildEnded) as told:
                list(asked.messages())
            assert told.value.exitcode == -signal.SIGKILL
    children.close()


@pytest.mark.processes
def test_a_process_that_is_kept_answers_one_question_after_the_other_and_another_one_beside_it() -> None:
    children = Children(count, name="counting", keep=TIMEOUT)
    children.prepare()
    first = list(children.begin(3).messages())
    second, third = children.begin(2000), children.begin(2)
    heard = [first, list(second.messages()), list(third.messages())]
    assert [len(messages) for messages in heard] == [3, 2000, 2]
    assert processes(heard[0]) == processes(heard[1]) != processes(heard[2])
    assert ended(third), "one is kept, and not two"
    assert not second.ended()
    children.close()
    assert ended(second)


@pytest.mark.processes
def test_one_that_is_not_kept_ends_with_its_answer_and_takes_what_was_prepared() -> None:
    children = Children(count, name="counting")
    children.prepare()
    children.prepare()
    (ready,) = (process for process in active_children() if process.name == "counting")
    asked = children.begin(1)
    assert asked.process is ready
    assert len(list(asked.messages())) == 1 and ended(asked)


@pytest.mark.processes
def test_what_is_not_wanted_any_more_ends_soon_and_its_process_goes_on() -> None:
    children = Children(count, name="counting", keep=TIMEOUT)
    endless = children.begin(10**9, grace=TIMEOUT)
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.extend(endless.messages()))
    reader.start()
    endless.stop()
    endless.stop()
    after = children.begin(4)
    assert len(list(after.messages())) == 4
    reader.join(TIMEOUT)
    assert after.process is endless.process and len(heard) < 10**9
    children.close()


def slow_to_heed(channel: Channel, deaf: bool) -> None:
    """The child: one that is deaf does not look whether its answer is wanted."""
    channel.say(b"begun")
    while deaf:
        time.sleep(60.0)


@pytest.mark.processes
@pytest.mark.parametrize("closes", [False, True])
def test_a_question_behind_one_that_is_stopped_too_late_has_another_process(closes: bool) -> None:
    children = Children(slow_to_heed, name="slow", keep=TIMEOUT)
    deaf = children.begin(True, grace=TIMEOUT if closes else 0.2)
    messages = deaf.messages()
    next(messages)
    deaf.stop()
    after = children.begin(False)
    assert after.process is deaf.process
    with ThreadPoolExecutor(1) as reader:
        answer = reader.submit(lambda: list(after.messages()))
        if closes:
            children.close()
        with pytest.raises(ChildEnded):
            next(messages)
        if closes:
            with pytest.raises(ChildEnded):
                answer.result(TIMEOUT)
        else:
            assert answer.result(TIMEOUT) == [b"begun"] and after.process is not deaf.process
    children.close()


@pytest.mark.processes
@pytest.mark.parametrize(("question", "code", "died"), [(-1, "unavailable", True), (0, "internal", False)])
def test_one_that_dies_or_fails_says_so_and_the_next_question_has_another(question: int, code: str, died: bool) -> None:
    children = Children(count, name="counting", keep=TIMEOUT)
    asked = children.begin(question)
    with pytest.raises(ConsoleError, match="counting") as error:
        list(asked.messages())
    assert error.value.code == code and isinstance(error.value, ChildEnded) == died
    assert not died or ("memory" in error.value.detail and not error.value.late)  # type: ignore[attr-defined]
    assert ended(asked)
    assert len(list(children.begin(1).messages())) == 1
    children.close()
    with pytest.raises(ChildEnded):
        children.begin(1)


REFUSALS = {
    "console": ConsoleError(404, "unknown_job", "there is none", field="job"),
    "planner": InputError("--fail", "W9", "a worker"),
    "infeasible": InfeasibleError("no room", "more of it"),
}


def say_all(channel: Channel, error: str) -> None:
    """The child: says a message of each kind, and then raises the error if there is one."""
    channel.say({"text": "-", "number": math.inf})
    channel.say(b"-{}")
    channel.say(b"")
    if error:
        raise REFUSALS[error]
    channel.check()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("error", "status", "code", "field"),
    [
        ("console", 404, "unknown_job", "job"),
        ("planner", 422, "invalid", "failed"),
        ("infeasible", 422, "invalid", ""),
    ],
)
def test_what_the_work_raises_is_raised_where_the_answer_is_read(
    error: str, status: int, code: str, field: str
) -> None:
    children = Children(say_all, name="saying", keep=TIMEOUT)
    said = [{"text": "-", "number": math.inf}, b"-{}", b""]
    asked, heard = children.begin(error), []
    with pytest.raises(ConsoleError) as refused:
        heard.extend(asked.messages())
    why = refused.value
    assert (why.status, why.code, why.field) == (status, code, field) and not isinstance(why, ChildEnded)
    after = children.begin("")
    assert list(after.messages()) == said == heard
    assert after.process is asked.process, "it is at no fault"
    children.close()


FAULTS = {
    "fault": ValueError("a fault"),
    "disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
}


def fail_and_stay(channel: Channel, error: str) -> None:
    """The child: raises the error, and leaves a thread behind that keeps its process."""
    threading.Thread(target=threading.Event().wait).start()
    raise FAULTS[error]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("error", "status", "said"), [("fault", 500, "ValueError"), ("disk", 503, os.strerror(errno.ENOSPC))]
)
def test_what_the_work_raises_is_raised_even_if_its_process_would_stay(error: str, status: int, said: str) -> None:
    children = Children(fail_and_stay, name="staying", keep=TIMEOUT)
    asked = children.begin(error, timeout=20.0)
    with pytest.raises(ConsoleError, match=said) as refused:
        list(asked.messages())
    assert refused.value.status == status and not isinstance(refused.value, ChildEnded)
    assert ended(asked)
    children.close()


@pytest.mark.processes
def test_work_that_nobody_wants_any_more_just_ends() -> None:
    children = Children(say_all, name="saying", keep=TIMEOUT)
    asked = children.begin("", grace=TIMEOUT)
    asked.stop()
    assert len(list(asked.messages())) == 3
    assert children.begin("").process is asked.process
    children.close()


def deaf(channel: Channel) -> None:
    """The child: listens to nobody, and has started a process of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if (child := os.fork()) == 0:
        signal.pause()
    channel.say(b"%d" % child)
    while True:
        time.sleep(60)


@pytest.mark.processes
def test_one_that_takes_too_long_is_ended_with_what_it_started() -> None:
    asked = Children(deaf, name="deaf").begin(grace=0.1)
    messages = asked.messages()
    grandchild = int(next(messages))
    asked.stop()
    with pytest.raises(ChildEnded) as error:
        next(messages)
    assert error.value.late and ended(asked)
    deadline = time.monotonic() + TIMEOUT
    while Path(f"/proc/{grandchild}").exists() and "State:\tZ" not in Path(f"/proc/{grandchild}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.processes
def test_a_question_has_its_time() -> None:
    with pytest.raises(ChildEnded) as error:
        Children(deaf, name="deaf").ask(timeout=0.1)
    assert error.value.late


@pytest.mark.processes
def test_no_more_than_so_many_at_a_time() -> None:
    children = Children(deaf, name="deaf", most=1)

    def take() -> None:
        with pytest.raises(ChildEnded):
            children.ask()

    taken = threading.Thread(target=take)
    taken.start()
    while not any(process.name == "deaf" for process in active_children()):
        time.sleep(0.01)
    with pytest.raises(ConsoleError, match="busy"):
        children.ask(wait=0.0)
    children.close()
    taken.join(TIMEOUT)
    assert not taken.is_alive()
