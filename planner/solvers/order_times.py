"""The times of an order of ops, and an order read backwards: loops of the window search.

An *order* lists all compute ops so that none comes before one that it waits for. It fixes the
schedule: each op starts as early (or as late) as the ops of its own worker and its micro-batch allow.
Code of an op: F is its item, I is items + item, W is 2 items + worker. W's are nameless: a worker's
k-th W is that of its k-th I, which is no loss, since they last equally long and nothing but memory, a
count, follows them. Memory needs no look at the times: how much a worker holds depends on the order.

Read backwards an iteration is one as well. Micro-batches come down the stages as I's and go up again
as F's; each W comes some time before its I instead of after it, and a worker holds a micro-batch from
its W's start to its F's end. So *down* is F forwards and I backwards, *up* is I and F, and the same
loops serve both directions.

Indices as in dispatch: worker = stage * pipelines + pipeline; item = stage * n + micro-batch.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

Ints = Sequence[int]
Buffer = MutableSequence[int]


def mirror(order: Ints, items: int, out: Buffer) -> None:
    """Writes `order` read backwards to `out`: its last op first, F's and I's exchanged."""
    last = len(order) - 1
    for k in range(len(order)):
        code = order[k]
        if code < items:
            code += items
        elif code < 2 * items:
            code -= items
        out[last - k] = code


def earliest(
    n: int,
    route: Ints,
    down: Ints,
    up: Ints,
    weight: Ints,
    transfer_down: Ints,
    transfer_up: Ints,
    release: Ints,
    order: Ints,
    count: int,
    start_down: Buffer,
    start_up: Buffer,
    free: Buffer,
    first: Buffer,
    last: Buffer,
) -> None:
    """Starts the first `count` ops of `order` as early as the order and the stages' `release` allow.

    Fills start_down and start_up by item, free by worker (when its last op has ended), first and last
    by stage (its first start and its last end; release for both where it has no op).
    down, up, weight: ticks by worker.
    """
    items = len(route)
    stages = items // n
    pipelines = len(down) // stages
    for w in range(len(down)):
        free[w] = release[w // pipelines]
    for s in range(stages):
        first[s] = -1
        last[s] = release[s]
    for k in range(count):
        code = order[k]
        if code >= 2 * items:
            w = code - 2 * items
            s = w // pipelines
            start = free[w]
            end = start + weight[w]
        elif code >= items:
            item = code - items
            s = item // n
            w = route[item]
            start = free[w]
            if s < stages - 1:
                start = max(start, start_up[item + n] + up[route[item + n]] + transfer_up[s])
            start_up[item] = start
            end = start + up[w]
        else:
            s = code // n
            w = route[code]
            start = free[w]
            if s > 0:
                start = max(start, start_down[code - n] + down[route[code - n]] + transfer_down[s - 1])
            start_down[code] = start
            end = start + down[w]
        free[w] = end
        if first[s] < 0 or start < first[s]:
            first[s] = start
        last[s] = max(last[s], end)
    for s in range(stages):
        if first[s] < 0:
            first[s] = release[s]


def weight_starts(
    route: Ints,
    down: Ints,
    up: Ints,
    weight: Ints,
    order: Ints,
    start_down: Ints,
    start_up: Ints,
    base: Ints,
    free: Buffer,
    started: Buffer,
    start_weight: Buffer,
) -> None:
    """Fills start_weight: worker w's k-th W at base[w] + k, when the op before it on w ends. free, started:
    zeros by worker."""
    items = len(route)
    for k in range(len(order)):
        code = order[k]
        if code >= 2 * items:
            w = code - 2 * items
            start_weight[base[w] + started[w]] = free[w]
            started[w] += 1
            free[w] += weight[w]
        elif code >= items:
            w = route[code - items]
            free[w] = start_up[code - items] + up[w]
        else:
            w = route[code]
            free[w] = start_down[code] + down[w]
