from __future__ import annotations

import asyncio
import threading
import time

from openrecycle.app.runtime.notify import AT_ONCE, Topic


def test_a_waiter_wakes_when_another_thread_publishes() -> None:
    async def main() -> int | None:
        topic, values = Topic(), list[int]()
        ready = threading.Event()

        def write() -> None:
            ready.wait(5)
            values.append(7)
            topic.publish()

        writer = threading.Thread(target=write)
        writer.start()

        def look() -> int | None:
            ready.set()
            return values[0] if values else None

        found = await topic.wait_for(look, 600)
        writer.join()
        return found

    assert asyncio.run(main()) == 7


def test_what_is_there_already_is_not_waited_for() -> None:
    assert asyncio.run(Topic().wait_for(lambda: "there", 0)) == "there"


def test_nothing_in_time_is_none() -> None:
    begin = time.monotonic()
    assert asyncio.run(Topic().wait_for(lambda: None, 0.05)) is None
    assert time.monotonic() - begin >= 0.05


def test_a_crowd_does_not_come_back_all_at_once() -> None:
    def nothing() -> int | None:
        return None

    async def main() -> None:
        topic = Topic(many=2, shares=(0.0, 0.0))
        first = [asyncio.create_task(topic.wait_for(nothing, 60)) for _ in range(2)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(topic.wait_for(nothing, 60), 10) is None, "sooner than asked for"
        assert not any(task.done() for task in first)
        topic.close()
        await asyncio.gather(*first)

    asyncio.run(main())


def test_a_closed_topic_sends_everyone_home() -> None:
    async def main() -> None:
        topic = Topic()
        waiting = asyncio.create_task(topic.wait_for(lambda: None, 60))
        await asyncio.sleep(0)
        topic.close()
        assert await asyncio.wait_for(waiting, 10) is None
        assert await topic.wait_for(lambda: None, 60) is None

    asyncio.run(main())


def test_a_publication_that_is_not_for_us_is_no_answer() -> None:
    async def main() -> None:
        topic = Topic()
        looks: list[int] = []

        def look() -> int | None:
            looks.append(1)
            return 3 if len(looks) == 4 else None

        waiting = asyncio.create_task(topic.wait_for(look, 60))
        while not waiting.done():
            topic.publish()
            await asyncio.sleep(0)
        assert waiting.result() == 3

    asyncio.run(main())


def test_thousands_that_wait_are_woken_some_at_a_time() -> None:
    async def run() -> list[int]:
        topic, told, steps = Topic(), [False], list[int]()
        waiting = [asyncio.create_task(topic.wait_for(lambda: told[0] or None, 60)) for _ in range(3 * AT_ONCE)]
        await asyncio.sleep(0)
        told[0] = True
        topic.publish()
        while not all(task.done() for task in waiting):
            await asyncio.sleep(0)
            steps.append(sum(task.done() for task in waiting))
        return steps

    steps = asyncio.run(run())
    assert max(b - a for a, b in zip([0, *steps], steps, strict=False)) <= AT_ONCE


def test_who_is_dismissed_waits_no_longer_and_who_comes_later_does() -> None:
    async def main() -> None:
        topic = Topic()
        waiting = asyncio.create_task(topic.wait_for(lambda: None, 60))
        await asyncio.sleep(0)
        topic.dismiss()
        assert await asyncio.wait_for(waiting, 10) is None
        later = asyncio.create_task(topic.wait_for(lambda: None, 60))
        await asyncio.sleep(0)
        assert not later.done() and topic.followed
        topic.close()
        await later

    asyncio.run(main())
