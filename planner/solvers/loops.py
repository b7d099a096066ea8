"""The loops of the list scheduler and of the window search, over flat integer arrays only.

So the same source runs in two ways with the same results: as plain Python (on lists), and compiled where numba is
installed and the problem is large. Without numba it is more than 20 times slower.
Indices: worker = stage * pipelines + pipeline; item = stage * n + micro-batch, where n counts the micro-batches of all
pipelines.
"""

from __future__ import annotations

import types
from collections.abc import Callable, MutableSequence, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from importlib.util import find_spec
from typing import Any

# -- the event loop of the list scheduler: one pass over all ops, in time order ----------------------

STATE = 12  # how many numbers `dispatch` and `redispatch` keep per worker

Ints = Sequence[int]
Buffer = MutableSequence[int]


def push(heap: Buffer, base: int, size: int, key: int) -> None:
    """Adds `key` to the binary heap of `size` keys that begins at heap[base]."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        above = heap[base + parent]
        if above <= key:
            break
        heap[base + at] = above
        at = parent
    heap[base + at] = key


def pop(heap: Buffer, base: int, size: int) -> int:
    """Takes the smallest key from the heap of `size` keys at heap[base], which then has size - 1."""
    top = heap[base]
    last = heap[base + size - 1]
    end = size - 1
    at = 0
    child = 1
    while child < end:
        if child + 1 < end and heap[base + child + 1] < heap[base + child]:
            child += 1
        if heap[base + child] >= last:
            break
        heap[base + at] = heap[base + child]
        at = child
        child = 2 * at + 1
    heap[base + at] = last
    return top


def mark(state: Buffer, marked: int, w: int, dirty: Buffer, n_dirty: int) -> int:
    """Adds a worker to the list of those that may have something to do, unless it is there; returns its length."""
    if state[marked + w] != 0:
        return n_dirty
    state[marked + w] = 1
    dirty[n_dirty] = w
    return n_dirty + 1


def expect(state: Buffer, due: int, now: int, arrival: int) -> None:
    """Updates a worker's `due`, the arrival of the next op that is on its way to it, as far as known."""
    if state[due] <= now or arrival < state[due]:
        state[due] = arrival


def worth_a_wait(due: int, now: int, length: int, most: int, latest: int) -> bool:
    """Should a worker wait for the op that arrives at `due` rather than run one of `length` ticks now? Only if the wait
    is less than `most` % of the delay that the awaited op is spared. latest: when the worker must go on."""
    wait = due - now
    return 0 < wait < length and wait * 100 < most * (length - wait) and due <= latest


def dispatch(
    pipelines: int,
    n: int,
    route: Ints,
    forward: Ints,
    input_backward: Ints,
    weight_backward: Ints,
    transfer: Ints,
    transfer_back: Ints,
    capacity: Ints,
    need: Ints,
    keep: Ints,
    split: Ints,
    key: Ints,
    depth: Ints,
    final: Ints,
    open_limit: Ints,
    max_wait: Ints,
    max_wait_w: Ints,
    slack: Buffer,
    base: Ints,
    ready_f: Buffer,
    ready_i: Buffer,
    pending_w: Buffer,
    start_f: Buffer,
    start_i: Buffer,
    start_w: Buffer,
    sequence: Buffer,
    state: Buffer,
    dirty: Buffer,
) -> int:
    """The event loop: plays one iteration in time order and decides what each worker runs next.

    Fills start_f, start_i, start_w (per item, ticks) and sequence (the ops in the order of their starts: F as item, I
    as items + item, W as 2 items + item). Returns the number of ops.

    Whenever a worker is free, it takes the first of these that is possible:
      1. W, when open_limit of them are pending and F's are still to come;
      2. F, when memory allows and either fewer than `depth` forwards are ahead of the backwards or
         at most `final` are still to come (the last ones have the longest way before them);
      3. I (or B where the worker does not split), when memory allows: W may need more than I;
      4. F, when memory allows;
      5. W.
    Before an F of rule 4 or a W, a worker may wait for an I that is on its way and would arrive before that op's end:
    if the wait is shorter than max_wait % of the delay that it spares the I, and the worker would still be done in time
    (`slack`). Before a W it may wait for an F in the same way (max_wait_w).

    The loop can't deadlock if each stage has room for a micro-batch. A worker waits only for an op that is running or
    being transferred, so if nothing runs, no worker waits by choice. On the last stage an F that has run
    is followed by its backward, which frees its memory; and if every worker of stage s + 1 frees
    its memory again and again, each micro-batch held on stage s is taken in turn, comes back,
    and is freed as well.

    route: worker of each item. forward, input_backward, weight_backward: ticks by worker (one that
    does not split takes both for B). transfer, transfer_back: by boundary, of activations and of
    gradients. capacity, need, keep: see planner.jobs.job.StageRoom. These, depth, final,
    open_limit, max_wait, max_wait_w: by stage. split: by worker, 0 or 1. key: by item, smaller first; equal
    keys go by micro-batch. slack: by worker, the latest tick at which it may begin all its work
    and end in time; the loop adds the work done to it. base: where each worker's part of ready_f,
    ready_i and pending_w begins. state: STATE zeros per worker.
    """
    workers = len(forward)
    stages = workers // pipelines
    items = stages * n
    # An event is time * codes + code. A code below `workers` is a worker that ends its op; others are arrivals.
    codes = workers + 2 * items
    # Where each field of `state` begins; one number per worker.
    size_f = 0  # how many F's and I's are ready
    size_i = workers
    head_w = 2 * workers  # how many W's have started, and how many have become pending
    tail_w = 3 * workers
    held = 4 * workers  # how much of `capacity` is taken
    ahead = 5 * workers  # F's started less I's started
    kind = 6 * workers  # of the running op: 0 none, 1 F, 2 I or B, 3 W
    current = 7 * workers
    marked = 8 * workers
    due_i = 9 * workers  # when the next I and F that are on their way arrive, as far as known
    due_f = 10 * workers
    left = 11 * workers  # F's that have not started yet
    for item in range(items):
        state[left + route[item]] += 1
    events = [0]
    heappop(events)
    started = 0
    n_dirty = 0
    for m in range(n):
        w = route[m]
        push(ready_f, base[w], state[size_f + w], key[m] * n + m)
        state[size_f + w] += 1
        n_dirty = mark(state, marked, w, dirty, n_dirty)
    now = 0
    while True:
        for k in range(n_dirty):
            w = dirty[k]
            state[marked + w] = 0
            if state[kind + w] != 0:
                continue
            s = w // pipelines
            has_w = state[tail_w + w] > state[head_w + w]
            # An F must leave room for the W of the oldest I (once all pending W's have run); else it locks the worker.
            may_f = (
                state[size_f + w] > 0
                and state[held + w] + need[s] <= capacity[s]
                and (split[w] == 0 or state[ahead + w] * need[s] + keep[s] <= capacity[s])
            )
            may_i = state[size_i + w] > 0 and (split[w] == 0 or state[held + w] - need[s] + keep[s] <= capacity[s])
            waits = True
            if has_w and state[left + w] > 0 and state[tail_w + w] - state[head_w + w] >= open_limit[s]:
                choice = 3
            elif may_f and (state[ahead + w] < depth[s] or state[left + w] <= final[s]):
                choice = 1
                waits = False  # it goes before I's, so it does not wait for one either
            elif may_i:
                choice = 2
            elif may_f:
                choice = 1
            elif has_w:
                choice = 3
            else:
                continue
            if waits and choice != 2:
                length = forward[w] if choice == 1 else weight_backward[w]
                if worth_a_wait(state[due_i + w], now, length, max_wait[s], slack[w]):
                    continue
                if choice == 3 and worth_a_wait(state[due_f + w], now, length, max_wait_w[s], slack[w]):
                    continue
            if choice == 1:
                m = pop(ready_f, base[w], state[size_f + w]) % n
                state[size_f + w] -= 1
                state[held + w] += need[s]
                state[ahead + w] += 1
                state[left + w] -= 1
                start_f[s * n + m] = now
                length = forward[w]
                if s < stages - 1:
                    lower = route[(s + 1) * n + m]
                    expect(state, due_f + lower, now, now + length + transfer[s])
            elif choice == 2:
                m = pop(ready_i, base[w], state[size_i + w]) % n
                state[size_i + w] -= 1
                state[ahead + w] -= 1
                start_i[s * n + m] = now
                length = input_backward[w]
                if split[w] == 0:
                    length += weight_backward[w]
                if s > 0:
                    upper = route[(s - 1) * n + m]
                    expect(state, due_i + upper, now, now + length + transfer_back[s - 1])
            else:
                m = pending_w[base[w] + state[head_w + w]]
                state[head_w + w] += 1
                start_w[s * n + m] = now
                length = weight_backward[w]
            slack[w] += length
            sequence[started] = (choice - 1) * items + s * n + m
            state[kind + w] = choice
            state[current + w] = m
            heappush(events, (now + length) * codes + w)
            started += 1
        n_dirty = 0
        if len(events) == 0:
            return started
        now = events[0] // codes
        while len(events) > 0 and events[0] // codes == now:
            code = heappop(events) - now * codes
            if code < workers:
                w = code
                s = w // pipelines
                m = state[current + w]
                done = state[kind + w]
                state[kind + w] = 0
                n_dirty = mark(state, marked, w, dirty, n_dirty)
                if done == 3:
                    state[held + w] -= keep[s]
                    continue
                if done == 1:
                    if s == stages - 1:
                        code = workers + items + s * n + m
                    else:
                        code = workers + (s + 1) * n + m
                        if transfer[s] > 0:
                            heappush(events, (now + transfer[s]) * codes + code)
                            continue
                else:
                    state[held + w] -= need[s]
                    if split[w] != 0:
                        state[held + w] += keep[s]
                        pending_w[base[w] + state[tail_w + w]] = m
                        state[tail_w + w] += 1
                    if s == 0:
                        continue
                    code = workers + items + (s - 1) * n + m
                    if transfer_back[s - 1] > 0:
                        heappush(events, (now + transfer_back[s - 1]) * codes + code)
                        continue
            item = code - workers
            if item < items:
                w = route[item]
                push(ready_f, base[w], state[size_f + w], key[item] * n + item % n)
                state[size_f + w] += 1
            else:
                item -= items
                w = route[item]
                push(ready_i, base[w], state[size_i + w], key[item] * n + item % n)
                state[size_i + w] += 1
            n_dirty = mark(state, marked, w, dirty, n_dirty)


def retime(
    n: int,
    route: Ints,
    forward: Ints,
    input_backward: Ints,
    weight_backward: Ints,
    transfer: Ints,
    transfer_back: Ints,
    split: Ints,
    sequence: Ints,
    started: int,
    start_f: Buffer,
    start_i: Buffer,
    start_w: Buffer,
    free: Buffer,
) -> None:
    """Starts each op of `sequence` as early as the order of ops on its worker allows.

    For ops whose order was found with other durations than these. Memory need not be checked again, since how much a
    worker holds at each of its ops depends on their order alone. free: zeros by worker.
    """
    items = len(route)
    stages = items // n
    for k in range(started):
        kind = sequence[k] // items
        item = sequence[k] % items
        s = item // n
        w = route[item]
        start = free[w]
        if kind == 0:
            if s > 0:
                start = max(start, start_f[item - n] + forward[route[item - n]] + transfer[s - 1])
            start_f[item] = start
            free[w] = start + forward[w]
        elif kind == 1:
            if s < stages - 1:
                below = route[item + n]
                arrival = start_i[item + n] + input_backward[below] + transfer_back[s]
                if split[below] == 0:
                    arrival += weight_backward[below]
                start = max(start, arrival)
            start_i[item] = start
            free[w] = start + input_backward[w]
            if split[w] == 0:
                free[w] += weight_backward[w]
        else:
            start_w[item] = start
            free[w] = start + weight_backward[w]


# -- the window search: the times of an order of ops, and a reversed order ---------------------------

# An *order* lists all compute ops so that none comes before one that it waits for. It fixes the
# schedule: each op starts as early (or as late) as the ops of its own worker and its micro-batch allow.
# An op's code: F is its item, I is items + item, W is 2 items + worker. W's are nameless: a worker's k-th W
# belongs to its k-th I. That loses nothing, since they last equally long and only memory, a count, depends on
# them. Memory is independent of the times: how much a worker holds follows from the order.
#
# A reversed iteration is an iteration as well. Micro-batches come down the stages as I's and go up again
# as F's; each W comes some time before its I instead of after it, and a worker holds a micro-batch from
# its W's start to its F's end. So *down* means F forwards and I backwards, *up* means I and F, and the same
# loops serve both directions.


def mirror(order: Ints, items: int, out: Buffer) -> None:
    """Writes `order` reversed to `out`: its last op first, with F's and I's exchanged."""
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
    """Starts the first `count` ops of `order` as early as the order and each stage's `release` allow.

    Fills start_down and start_up by item; free by worker (the end of its last op); first and last by
    stage (its first start and its last end; both are its release where it has no op).
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
    """Fills start_weight: worker w's k-th W is at base[w] + k, and starts when the op before it on w ends. free,
    started: zeros by worker."""
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


# -- the window search: a part of an order of ops, dispatched anew -----------------------------------

# A dispatcher packs the ops that it still has ahead of it well, and is left with what remains at the end. So
# forwards it packs the warm-up well, and backwards the cool-down.


def redispatch(
    pipelines: int,
    n: int,
    route: Ints,
    down: Ints,
    up: Ints,
    weight: Ints,
    transfer_down: Ints,
    transfer_up: Ints,
    backwards: int,
    capacity: Ints,
    key_down: Ints,
    key_up: Ints,
    depth: Ints,
    final: Ints,
    open_limit: Ints,
    max_wait: Ints,
    max_wait_w: Ints,
    slack: Buffer,
    base: Ints,
    begin: int,
    end: int,
    start_down: Ints,
    start_up: Ints,
    free: Ints,
    ready_down: Buffer,
    ready_up: Buffer,
    part: Buffer,
    state: Buffer,
    dirty: Buffer,
    order: Buffer,
) -> int:
    """Puts order[begin:end] in the order in which this event loop starts the ops; returns how many it
    started. If that is fewer than end - begin, the memory limit stopped the loop, and `order` is unchanged.

    The rules are those of `dispatch`, with down for F and up for I. Backwards, a W is always available,
    but takes memory; a micro-batch can come down only when a W has been run for it; and
    open_limit is not used.

    start_down, start_up, free: as `earliest` computes them for the ops before the window. slack: the latest
    tick at which each worker may begin all its work. part: 5 items zeros; state: STATE zeros per worker.
    """
    items = len(route)
    stages = items // n
    workers = len(down)
    never = -(1 << 40)
    # An event is time * codes + code. A code below `workers` is a worker that gets free; others are arrivals.
    codes = workers + 2 * items
    size_down = 0
    size_up = workers
    stock = 2 * workers  # forwards: W's that may run; backwards: micro-batches that may come down
    held = 3 * workers  # activations
    ahead = 4 * workers  # micro-batches that have come down and have not gone up yet, but will in this window
    kind = 5 * workers  # of the running op: 1 down, 2 up, 3 W; 9 until the part before the window has ended
    current = 6 * workers
    marked = 7 * workers
    due_down = 8 * workers
    due_up = 9 * workers
    left_down = 10 * workers
    left_w = 11 * workers
    for w in range(workers):
        state[due_down + w] = never
        state[due_up + w] = never
        state[kind + w] = 9
    # part: of each down (item) and up (items + item): 0 after the window, 1 inside, 2 before.
    for k in range(begin):
        code = order[k]
        if code >= 2 * items:
            w = code - 2 * items
            slack[w] += weight[w]
            if backwards:
                state[held + w] += 1
                state[stock + w] += 1
            else:
                state[held + w] -= 1
                state[stock + w] -= 1
            continue
        part[code] = 2
        w = route[code % items]
        if code < items:
            slack[w] += down[w]
            state[ahead + w] += 1
            if backwards:
                state[stock + w] -= 1
            else:
                state[held + w] += 1
        else:
            slack[w] += up[w]
            state[ahead + w] -= 1
            if backwards:
                state[held + w] -= 1
            else:
                state[stock + w] += 1
    for k in range(begin, end):
        code = order[k]
        if code >= 2 * items:
            state[left_w + code - 2 * items] += 1
        else:
            part[code] = 1
            if code < items:
                state[left_down + route[code]] += 1
    events = [0]
    heappop(events)
    for w in range(workers):
        heappush(events, free[w] * codes + w)
    for item in range(items):
        s = item // n
        w = route[item]
        if part[item] == 2 and part[items + item] == 0:
            state[ahead + w] -= 1  # it does not go up in this window
        if part[item] == 1 and (s == 0 or part[item - n] == 2):
            at = free[w]
            if s > 0:
                at = start_down[item - n] + down[route[item - n]] + transfer_down[s - 1]
            heappush(events, at * codes + workers + item)
        if part[items + item] == 1:
            if s == stages - 1:
                if part[item] == 2:
                    at = start_down[item] + down[w]
                    heappush(events, at * codes + workers + items + item)
            elif part[items + item + n] == 2:
                at = start_up[item + n] + up[route[item + n]] + transfer_up[s]
                heappush(events, at * codes + workers + items + item)
    started = 0
    n_dirty = 0
    while len(events) > 0:
        now = events[0] // codes
        while len(events) > 0 and events[0] // codes == now:
            code = heappop(events) - now * codes
            if code < workers:
                w = code
                s = w // pipelines
                done = state[kind + w]
                item = s * n + state[current + w]
                state[kind + w] = 0
                n_dirty = mark(state, marked, w, dirty, n_dirty)
                if done == 3 and not backwards:
                    state[held + w] -= 1
                if done == 1:
                    if s == stages - 1:
                        if part[items + item] != 1:
                            continue
                        code = workers + items + item
                    else:
                        if part[item + n] != 1:
                            continue
                        code = workers + item + n
                        if transfer_down[s] > 0:
                            heappush(events, (now + transfer_down[s]) * codes + code)
                            continue
                elif done == 2:
                    if backwards:
                        state[held + w] -= 1
                    else:
                        state[stock + w] += 1
                    if s == 0 or part[items + item - n] != 1:
                        continue
                    code = workers + items + item - n
                    if transfer_up[s - 1] > 0:
                        heappush(events, (now + transfer_up[s - 1]) * codes + code)
                        continue
                else:
                    continue
            item = code - workers
            if item < items:
                w = route[item]
                push(ready_down, base[w], state[size_down + w], key_down[item] * n + item % n)
                state[size_down + w] += 1
            else:
                item -= items
                w = route[item]
                push(ready_up, base[w], state[size_up + w], key_up[item] * n + item % n)
                state[size_up + w] += 1
            n_dirty = mark(state, marked, w, dirty, n_dirty)
        for k in range(n_dirty):
            w = dirty[k]
            state[marked + w] = 0
            if state[kind + w] != 0:
                continue
            s = w // pipelines
            full = state[held + w] >= capacity[s]
            if backwards:
                may_w = state[left_w + w] > 0 and not full
                may_down = state[size_down + w] > 0 and (state[stock + w] > 0 or may_w)
                forced = False
            else:
                may_w = state[left_w + w] > 0 and state[stock + w] > 0
                may_down = state[size_down + w] > 0 and not full
                forced = may_w and state[left_down + w] > 0 and state[stock + w] >= open_limit[s]
            waits = True
            if forced:
                choice = 3
            elif may_down and (state[ahead + w] < depth[s] or state[left_down + w] <= final[s]):
                choice = 1
                waits = False
            elif state[size_up + w] > 0:
                choice = 2
            elif may_down:
                choice = 1
            elif may_w:
                choice = 3
            else:
                continue
            if choice == 1 and backwards and state[stock + w] == 0:
                choice = 3
            if waits and choice != 2:
                length = down[w] if choice == 1 else weight[w]
                if worth_a_wait(state[due_up + w], now, length, max_wait[s], slack[w]):
                    continue
                for_stock = backwards and state[stock + w] == 0
                if (
                    choice == 3
                    and not for_stock
                    and worth_a_wait(state[due_down + w], now, length, max_wait_w[s], slack[w])
                ):
                    continue
            if choice == 1:
                m = pop(ready_down, base[w], state[size_down + w]) % n
                state[size_down + w] -= 1
                state[left_down + w] -= 1
                item = s * n + m
                if part[items + item] == 1:
                    state[ahead + w] += 1
                if backwards:
                    state[stock + w] -= 1
                else:
                    state[held + w] += 1
                length = down[w]
                code = item
                if s < stages - 1 and part[item + n] == 1:
                    other = route[item + n]
                    expect(state, due_down + other, now, now + length + transfer_down[s])
            elif choice == 2:
                m = pop(ready_up, base[w], state[size_up + w]) % n
                state[size_up + w] -= 1
                state[ahead + w] -= 1
                item = s * n + m
                length = up[w]
                code = items + item
                if s > 0 and part[code - n] == 1:
                    other = route[item - n]
                    expect(state, due_up + other, now, now + length + transfer_up[s - 1])
            else:
                m = 0
                state[left_w + w] -= 1
                if backwards:
                    state[stock + w] += 1
                    state[held + w] += 1
                else:
                    state[stock + w] -= 1
                length = weight[w]
                code = 2 * items + w
            slack[w] += length
            state[kind + w] = choice
            state[current + w] = m
            part[2 * items + started] = code
            started += 1
            heappush(events, (now + length) * codes + w)
        n_dirty = 0
    if started == end - begin:
        for k in range(started):
            order[begin + k] = part[2 * items + k]
    return started


# -- compiled ----------------------------------------------------------------------------------------

# With fewer ops, plain Python is done before numba has been imported.
WORTH_COMPILING = 15_000
INT64 = 1 << 62


def worth_compiling(ops: int) -> bool:
    """Is numba installed, and does machine code pay for a problem of so many ops? Once it has been loaded, it pays for
    all sizes: it is twice as fast for 48 ops, 13 times for 12,000."""
    loaded = compiled_functions.cache_info().currsize > 0
    return loaded or (ops >= WORTH_COMPILING and find_spec("numba") is not None)


@lru_cache(maxsize=1)
def compiled_functions() -> tuple[Callable[..., int], Callable[..., None]]:
    """Return `dispatch` and `retime` as machine code over int64 arrays, cached on disk where that can be written.

    Raises ImportError without numba.
    """
    return _build(dispatch, **_helpers()), _build(retime)


@lru_cache(maxsize=1)
def compiled_windows() -> dict[str, Callable[..., Any]]:
    """Return the functions of the window search as machine code, by name."""
    times = {f.__name__: _build(f) for f in (mirror, earliest, weight_starts)}
    return {**times, "redispatch": _build(redispatch, **_helpers())}


@lru_cache(maxsize=1)
def _helpers() -> dict[str, Any]:
    """Return the helpers as machine code: compiled loops can call only compiled functions, which `_build` puts among
    their globals."""
    return {f.__name__: _build(f) for f in (push, pop, mark, expect, worth_a_wait)}


def _build(function: Callable[..., Any], **names: Any) -> Any:
    import numba

    twin = types.FunctionType(function.__code__, {**globals(), **names}, function.__name__, function.__defaults__)
    twin.__module__, twin.__qualname__ = __name__, function.__qualname__
    try:
        return numba.njit(cache=True)(twin)
    except RuntimeError:  # there is no folder to cache in
        return numba.njit(twin)
