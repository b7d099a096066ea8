"""The loops of `dispatch`, `order_times` and `windows`, compiled where numba is installed and the problem is large.

Same source, same results. Without numba it runs as plain Python on lists, more than 20 times slower.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from openrecycle.planner.solvers import dispatch, order_times, windows

# Below this many ops plain Python is done before numba has been imported.
WORTH_COMPILING = 15_000
INT64 = 1 << 62


def worth_compiling(ops: int) -> bool:
    """Is numba here, and does it pay for a problem of so many ops?"""
    return ops >= WORTH_COMPILING and find_spec("numba") is not None


@lru_cache(maxsize=1)
def compiled_functions() -> tuple[Callable[..., int], Callable[..., None]]:
    """`dispatch` and `retime` as machine code over int64 arrays, kept on disk where that can be
    written.

    Raises ImportError without numba.
    """
    return _build(dispatch, dispatch.dispatch, **_heap()), _build(dispatch, dispatch.retime)


@lru_cache(maxsize=1)
def compiled_windows() -> dict[str, Callable[..., Any]]:
    """The functions of `order_times` and `windows` in the same way, by name."""
    times = (order_times.mirror, order_times.earliest, order_times.weight_starts)
    loops = {f.__name__: _build(order_times, f) for f in times}
    return {**loops, "redispatch": _build(windows, windows.redispatch, **_heap())}


@lru_cache(maxsize=1)
def _heap() -> dict[str, Any]:
    """The loops must call the compiled heap functions, which they find among their globals."""
    return {"push": _build(dispatch, dispatch.push), "pop": _build(dispatch, dispatch.pop)}


def _build(module: types.ModuleType, function: Callable[..., Any], **names: Any) -> Any:
    import numba

    twin = types.FunctionType(function.__code__, {**vars(module), **names}, function.__name__, function.__defaults__)
    twin.__module__, twin.__qualname__ = module.__name__, function.__qualname__
    try:
        return numba.njit(cache=True)(twin)
    except RuntimeError:  # no folder to cache in
        return numba.njit(twin)
