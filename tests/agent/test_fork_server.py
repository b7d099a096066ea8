"""What workers are forked from: its imports are there for all of them, and Python's collector leaves them alone."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import subprocess
import sys
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from openrecycle.forking import end_with_parent, fork_context
from tests.agent.launches import warm

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
IN_CLONE = os.environ | {"PYTHONPATH": f"{ROOT}/.src:{ROOT}"}


def _say(to: Connection) -> None:
    before = len(gc.get_objects())
    gc.collect()
    to.send((gc.isenabled(), gc.get_freeze_count(), before))


def test_a_round_of_the_collector_looks_through_what_a_worker_has_made_alone() -> None:
    warm()
    mine, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("forkserver").Process(target=_say, args=(theirs,), daemon=True)
    worker.start()
    assert mine.poll(60)
    enabled, imported, own = mine.recv()
    worker.join(60)
    assert enabled and imported > 100_000 and own < imported / 10


def _tell_name(to: Connection) -> None:
    to.send(Path(f"/proc/{os.getpid()}/comm").read_text().strip())


def test_the_system_knows_a_process_by_its_name() -> None:
    warm()
    mine, theirs = multiprocessing.Pipe()
    worker = fork_context().Process(target=_tell_name, args=(theirs,), name="W1_2.1", daemon=True)
    worker.start()
    assert mine.poll(60) and mine.recv() == "W1_2.1"
    worker.join(60)


def _add(to: Connection) -> None:
    from openrecycle.agent.stages import numba_add

    imported = set(sys.modules)
    for wide in (torch.float32, torch.float64):
        numba_add.add(torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=wide), torch.zeros(1), 2.0, 1e9)
    to.send(sorted(set(sys.modules) - imported))


def test_the_first_sum_of_a_worker_imports_nothing() -> None:
    pytest.importorskip("numba")
    warm()
    mine, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("forkserver").Process(target=_add, args=(theirs,), daemon=True)
    worker.start()
    assert mine.poll(60)
    assert mine.recv() == []
    worker.join(60)


def _child(pipe: Connection) -> None:
    end_with_parent(partial(os._exit, 0))
    pipe.send("begun")
    pipe.poll(120)


def _parent(pipe: Connection) -> None:
    child = fork_context().Process(target=_child, args=(pipe,))
    child.start()
    pipe.close()
    child.join()


def test_a_child_ends_with_its_parent_however_that_ends() -> None:
    warm()
    mine, theirs = multiprocessing.Pipe()
    parent = fork_context().Process(target=_parent, args=(theirs,))
    parent.start()
    theirs.close()
    assert mine.poll(60) and mine.recv() == "begun"
    parent.kill()
    assert mine.poll(60)
    with pytest.raises(EOFError):
        mine.recv()


_ONE_FAILS = """
import multiprocessing, os
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.agent.no_forks", "openrecycle.fork_server"])
kept = []
def started():
    mine, theirs = context.Pipe()
    kept.append(theirs)  # else the worker would end by itself
    process = context.Process(target=mine.recv, daemon=True)
    process.start()
    return process
first = started()
try:
    started()
except (OSError, EOFError):
    print("refused")
third = started()
print(first.is_alive(), third.is_alive())
first.kill(), third.kill()
first.join(60), third.join(60)
print(first.exitcode, third.exitcode)
"""


def test_a_fork_that_fails_ends_no_other_worker() -> None:
    said = subprocess.run([sys.executable, "-c", _ONE_FAILS], capture_output=True, text=True, timeout=120)
    assert said.stdout.splitlines() == ["refused", "True True", "-9 -9"], said.stderr
    assert os.strerror(errno.EAGAIN) in said.stderr


_KILLED = """
import os, signal
from multiprocessing import forkserver
from openrecycle.forking import start_server
os.environ["SECRET"] = "s"
def asked():
    context = start_server(["openrecycle.planner"], without=["SECRET"], safe_path=True)
    mine, theirs = context.Pipe()
    process = context.Process(target=exec, args=("import os; pipe.send([os.getenv('SECRET')])", {"pipe": theirs}))
    process.start()
    process.join(60)
    return mine.recv(), dict(os.environ)
before, server = dict(os.environ), forkserver._forkserver
first = asked()
os.kill(server._forkserver_pid, signal.SIGKILL)
os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOWAIT)
print(first == asked() == ([None], before))
"""


def test_a_server_that_is_gone_is_started_again_without_what_it_must_not_have() -> None:
    said = subprocess.run([sys.executable, "-c", _KILLED], capture_output=True, text=True, timeout=120)
    assert said.stdout.strip() == "True", said.stderr


_ITS_CHILD_STAYS = """
import os, signal, sys
from multiprocessing import forkserver
from openrecycle.forking import start_server
context = start_server(["openrecycle.forking"])
ours, theirs = context.Pipe()
process = context.Process(target=exec, args=(sys.argv[1], {"pipe": theirs}))
process.start()
theirs.close()
child = ours.recv()
process.kill()
process.join(60)
try:
    print(ours.recv() if ours.poll(20) else "nothing")
except EOFError:
    print("seen")
server = forkserver._forkserver
os.close(server._forkserver_alive_fd)
signal.alarm(20)
os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOWAIT)
print("over")
os.kill(child, signal.SIGKILL)
"""
_FORKED = "child = os.fork()\nif not child: time.sleep(100)"
_STARTED = "child = subprocess.Popen(['sleep', '100'], close_fds=False).pid"


@pytest.mark.parametrize("child", [_FORKED, _STARTED], ids=["forked", "started"])
def test_a_child_that_outlives_a_worker_hides_its_end_from_nobody(child: str) -> None:
    """As a user's layer may have one."""
    before = "import os, subprocess, time\nfrom openrecycle.forking import keep_from_children"
    worker = f"{before}\nkeep_from_children([pipe])\n{child}\npipe.send(child)\ntime.sleep(100)"
    said = subprocess.run([sys.executable, "-c", _ITS_CHILD_STAYS, worker], capture_output=True, text=True, timeout=120)
    assert said.stdout.splitlines() == ["seen", "over"], said.stderr


_INTERRUPTED = """
import os, signal, sys
from multiprocessing import forkserver
from openrecycle.forking import start_server
context = start_server(["imported_for_long"])
open("begun").read()
os.kill(forkserver._forkserver._forkserver_pid, signal.SIGINT)
open("go_on", "w").close()
mine, its = context.Pipe()
process = context.Process(target=exec, args=(sys.argv[1], {"pipe": its}))
process.start()
process.join(60)
print(mine.recv())
"""
_IMPORTED_FOR_LONG = "open('begun', 'w').close()\nopen('go_on').read()"
_TAKES_IT = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    pipe.send("taken")
"""


def test_ctrl_c_while_it_imports_ends_it_not_and_reaches_what_is_forked(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun"), os.mkfifo(tmp_path / "go_on")
    (tmp_path / "imported_for_long.py").write_text(_IMPORTED_FOR_LONG)
    command = [sys.executable, "-c", _INTERRUPTED, _TAKES_IT]
    said = subprocess.run(command, cwd=tmp_path, env=IN_CLONE, capture_output=True, text=True, timeout=120)
    assert said.stdout.strip() == "taken" and not said.stderr, said.stderr


_LEAVES_ONE = """
import sys
from openrecycle.forking import start_server
context = start_server([])
process = context.Process(target=exec, args=(sys.argv[1], {}))
process.start()
process.join(60)
print(process.exitcode)
"""


_MAKES_ONE = "import multiprocessing, os; lock = multiprocessing.RLock(); os._exit(0)"


def test_what_a_worker_leaves_to_be_removed_is_no_news(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LEAVES_ONE, _MAKES_ONE]
    said = subprocess.run(command, cwd=tmp_path, env=IN_CLONE, capture_output=True, text=True, timeout=120)
    assert said.stdout.strip() == "0" and not said.stderr, said.stderr
