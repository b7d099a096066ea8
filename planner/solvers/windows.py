"""The loop of the window search: a part of an order of ops (see `order_times`) dispatched anew.

What a dispatcher sees ahead of it, it packs well; towards the end it must live with what is left.
Going forwards it packs the warm-up, going backwards the cool-down.
"""

from __future__ import annotations

from heapq import heappop, heappush

from openrecycle.planner.solvers.dispatch import pop, push
from openrecycle.planner.solvers.order_times import Buffer, Ints

WINDOW_STATE = 14  # numbers that `redispatch` keeps per worker


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
    started. When that is fewer than end - begin, memory locked it, and `order` is what it was.

    The rules are those of `dispatch`, with down for F and up for I. Backwards, a W is there for the
    taking, but takes memory; a micro-batch can come down only when a W has been run for it; and
    open_limit does not count.

    start_down, start_up, free: of the ops before the window, as `earliest` gives them. slack: the latest
    tick at which each worker may begin all its work. part: 5 items zeros; state: WINDOW_STATE zeros per
    worker.
    """
    items = len(route)
    stages = items // n
    workers = len(down)
    never = -(1 << 40)
    # One event is time * codes + code: below `workers` a worker is free, above an arrival.
    codes = workers + 2 * items
    size_down = 0
    size_up = workers
    stock = 2 * workers  # W's that may run (forwards), micro-batches that may come down (backwards)
    held = 3 * workers  # activations
    ahead = 4 * workers  # micro-batches that came down and go up in this window, or are yet to
    kind = 5 * workers  # of the running op: 1 down, 2 up, 3 W; 9 in the part before the window
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
            state[ahead + w] -= 1  # it stays down for good
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
                if state[marked + w] == 0:
                    state[marked + w] = 1
                    dirty[n_dirty] = w
                    n_dirty += 1
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
            if state[marked + w] == 0:
                state[marked + w] = 1
                dirty[n_dirty] = w
                n_dirty += 1
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
                wait = state[due_up + w] - now
                if 0 < wait < length and wait * 100 < max_wait[s] * (length - wait) and now + wait <= slack[w]:
                    continue
                wait = state[due_down + w] - now
                if (
                    choice == 3
                    and 0 < wait < length
                    and wait * 100 < max_wait_w[s] * (length - wait)
                    and now + wait <= slack[w]
                    and not (backwards and state[stock + w] == 0)
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
                    arrival = now + length + transfer_down[s]
                    if state[due_down + other] <= now or arrival < state[due_down + other]:
                        state[due_down + other] = arrival
            elif choice == 2:
                m = pop(ready_up, base[w], state[size_up + w]) % n
                state[size_up + w] -= 1
                state[ahead + w] -= 1
                item = s * n + m
                length = up[w]
                code = items + item
                if s > 0 and part[code - n] == 1:
                    other = route[item - n]
                    arrival = now + length + transfer_up[s - 1]
                    if state[due_up + other] <= now or arrival < state[due_up + other]:
                        state[due_up + other] = arrival
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
