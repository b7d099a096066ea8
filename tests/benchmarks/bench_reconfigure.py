"""torch's own reconfiguration of a gloo group (2.14 and later) against a new group over the store, as the product makes
one where it has no connections on standby.

So many processes, by turns in one run; half-way one leaves. Each knows the others' handles before the clock starts.
Printed: the last process's milliseconds, of each round.

    python -m tests.benchmarks.bench_reconfigure --processes 12
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed

from openrecycle.agent.config.options import LOOPBACK
from openrecycle.agent.models import compat
from openrecycle.agent.transport.communicator import RendezvousStore
from tests.benchmarks.machine import describe

dist: Any = torch.distributed

ROUNDS = 6
TIMEOUT = timedelta(seconds=60.0)


def _process(rank: int, size: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    device = compat.gloo_device(LOOPBACK)
    options = dist.ProcessGroupGloo._Options()
    options._timeout, options._devices, options.enable_reconfigure = TIMEOUT, [device], True
    lasting = dist.ProcessGroupGloo(dist.PrefixStore("lasting", store), rank, size, options)
    members, made, taken = list(range(size)), [], []

    def meet(name: str) -> None:
        if store.add(name, 1) == len(members):
            store.set(f"{name}/go", b"")
        store.get(f"{name}/go")

    def timed(name: str, form: Callable[[], Any]) -> None:
        meet(name)
        began = perf_counter()
        group = form()
        taken.append((name, 1000 * (perf_counter() - began)))
        total = torch.ones(1)
        group.allreduce([total]).wait()
        assert total.item() == len(members)

    for number in range(ROUNDS):
        if number == ROUNDS // 2 and rank == members.pop():
            break
        store.set(f"handle{number}/{rank}", lasting.get_reconfigure_handle())
        how = dist.distributed_c10d.ReconfigureOptions()
        how.uuid, how.timeout = number, TIMEOUT
        how.handles = [store.get(f"handle{number}/{other}").decode() for other in members]

        def reconfigured(how: Any = how) -> Any:
            lasting.reconfigure(how).wait()
            return lasting

        def new(number: int = number) -> Any:
            here = dist.PrefixStore(f"new{number}", store)
            made.append(compat.gloo_group(here, members.index(rank), len(members), timeout=TIMEOUT, device=device))
            return made[-1]

        timed(f"reconfigured {number}", reconfigured)
        timed(f"new {number}", new)
    results.put(taken)
    results.close()
    results.join_thread()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=12)
    size = parser.parse_args().processes
    print(describe())
    if not hasattr(dist.distributed_c10d, "ReconfigureOptions"):
        print(f"torch {torch.__version__} has no reconfiguration: 2.14 or later is needed")
        return
    store = RendezvousStore()
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    processes = [context.Process(target=_process, args=(r, size, store.address[1], results)) for r in range(size)]
    for process in processes:
        process.start()
    found = [dict(results.get(timeout=120.0)) for _ in processes]
    for kind in ("reconfigured", "new"):
        worst = [max(one[name] for one in found if name in one) for name in (f"{kind} {n}" for n in range(ROUNDS))]
        print(f"{kind}, {size} processes and then {size - 1}: " + ", ".join(f"{ms:.0f}" for ms in worst) + " ms")
    print(describe())


if __name__ == "__main__":
    main()
