"""Runs the console's blocking calls in threads of the API's own, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from pydantic import BaseModel
from starlette.responses import Response

P = ParamSpec("P")
T = TypeVar("T")

# The database has one writer at a time: more threads would only queue in another place.
_pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="api")


# Jobs are made one after the other: one of 16,384 workers takes half a second, and all threads would be taken by eight.
_maker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="new jobs")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(_pool, partial(function, *args, **kwargs))


async def in_turn(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For making what may have thousands of workers: whoever asks for something else meanwhile waits for none of it."""
    return await asyncio.get_running_loop().run_in_executor(_maker, partial(function, *args, **kwargs))


async def answer_in_thread(function: Callable[P, BaseModel], *args: P.args, **kwargs: P.kwargs) -> Response:
    """What the function returns, as JSON, for what may speak of thousands: FastAPI would write it in the event loop."""

    def text() -> str:
        return function(*args, **kwargs).model_dump_json()

    return Response(await in_thread(text), media_type="application/json")
