"""The event loop of the list scheduler: one pass over all ops, in time order.

Written over flat integer arrays only, so that the same source runs as plain Python (on lists) and
compiled. Indices: worker = stage * pipelines + pipeline; item = stage * n + micro-batch, where n
counts the micro-batches of all pipelines.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from heapq import heappop, heappush

STATE = 12  # numbers that `dispatch` keeps per worker

Ints = Sequence[int]
Buffer = MutableSequence[int]


def push(heap: Buffer, base: int, size: int, key: int) -> None:
    """Adds `key` to the binary heap of `size` keys that lies at `base`."""
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
    """Takes the smallest key of the heap of `size` keys at `base`; leaves size - 1 of them."""
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
    """Fills start_f, start_i, start_w (per item, ticks) and sequence (the ops in the order of their
    starts, F's as item, I's as items + item, W's as 2 items + item); returns the number of ops.

    Each worker takes, whenever it is free, the first of these that it may:
      1. W, when open_limit of them are pending and F's are still to come;
      2. F, when memory allows and either fewer than `depth` forwards are ahead of the backwards or
         at most `final` are still to come (the last ones have the longest way before them);
      3. I (or B where the worker does not split);
      4. F, when memory allows;
      5. W.
    Before an F of 4. or a W it may wait for an I that is under way and would come before that op's end:
    when the wait is shorter than max_wait % of the delay it spares the I, and the worker would
    still be done in time (`slack`). Before a W it may wait for an F in the same way (max_wait_w).

    No limit of at least 1 can deadlock. A worker waits only for an op that is running or being
    transferred, so if nothing runs, nobody waits by choice. On the last stage an F that has run
    is followed by its backward, which frees its memory; and if every worker of stage s + 1 frees
    its memory again and again, each micro-batch held on stage s is taken in turn, comes back,
    and is freed as well.

    route: worker of each item. forward, input_backward, weight_backward: ticks by worker (one that
    does not split takes both for B). transfer, transfer_back: by boundary, of activations and of
    gradients. capacity, depth, final,
    open_limit, max_wait, max_wait_w: by stage. split: by worker, 0 or 1. key: by item, smaller first; equal
    keys go by micro-batch. slack: by worker, the latest tick at which it may begin all its work
    and end in time; moves on with the work done. base: where each worker's part of ready_f,
    ready_i and pending_w begins. state: STATE zeros per worker.
    """
    workers = len(forward)
    stages = workers // pipelines
    items = stages * n
    # One event is time * codes + code; below `workers` a worker ends its op, above an arrival.
    codes = workers + 2 * items
    # Where each field of `state` begins; one number per worker.
    size_f = 0  # F's and I's that are ready
    size_i = workers
    head_w = 2 * workers  # W's that were started, and those that became pending
    tail_w = 3 * workers
    held = 4 * workers  # activations
    ahead = 5 * workers  # F's started less I's started
    kind = 6 * workers  # of the running op: 0 none, 1 F, 2 I or B, 3 W
    current = 7 * workers
    marked = 8 * workers
    due_i = 9 * workers  # when the next I and F that are under way arrive, as far as known
    due_f = 10 * workers
    left = 11 * workers  # F's that have not started
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
        if state[marked + w] == 0:
            state[marked + w] = 1
            dirty[n_dirty] = w
            n_dirty += 1
    now = 0
    while True:
        for k in range(n_dirty):
            w = dirty[k]
            state[marked + w] = 0
            if state[kind + w] != 0:
                continue
            s = w // pipelines
            has_w = state[tail_w + w] > state[head_w + w]
            may_f = state[size_f + w] > 0 and state[held + w] < capacity[s]
            waits = True
            if has_w and state[left + w] > 0 and state[tail_w + w] - state[head_w + w] >= open_limit[s]:
                choice = 3
            elif may_f and (state[ahead + w] < depth[s] or state[left + w] <= final[s]):
                choice = 1
                waits = False  # it goes before I's, so it does not wait for one either
            elif state[size_i + w] > 0:
                choice = 2
            elif may_f:
                choice = 1
            elif has_w:
                choice = 3
            else:
                continue
            if waits and choice != 2:
                length = forward[w] if choice == 1 else weight_backward[w]
                wait = state[due_i + w] - now
                if 0 < wait < length and wait * 100 < max_wait[s] * (length - wait) and now + wait <= slack[w]:
                    continue
                wait = state[due_f + w] - now
                if (
                    choice == 3
                    and 0 < wait < length
                    and wait * 100 < max_wait_w[s] * (length - wait)
                    and now + wait <= slack[w]
                ):
                    continue
            if choice == 1:
                m = pop(ready_f, base[w], state[size_f + w]) % n
                state[size_f + w] -= 1
                state[held + w] += 1
                state[ahead + w] += 1
                state[left + w] -= 1
                start_f[s * n + m] = now
                length = forward[w]
                if s < stages - 1:
                    lower = route[(s + 1) * n + m]
                    arrival = now + length + transfer[s]
                    if state[due_f + lower] <= now or arrival < state[due_f + lower]:
                        state[due_f + lower] = arrival
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
                    arrival = now + length + transfer_back[s - 1]
                    if state[due_i + upper] <= now or arrival < state[due_i + upper]:
                        state[due_i + upper] = arrival
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
                if state[marked + w] == 0:
                    state[marked + w] = 1
                    dirty[n_dirty] = w
                    n_dirty += 1
                if done == 3:
                    state[held + w] -= 1
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
                    if split[w] == 0:
                        state[held + w] -= 1
                    else:
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
            if state[marked + w] == 0:
                state[marked + w] = 1
                dirty[n_dirty] = w
                n_dirty += 1


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

    For ops whose order was found with other durations than these. Memory needs no second look:
    how much a worker holds at each of its ops depends on their order alone. free: zero by worker.
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
