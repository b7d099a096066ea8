"""Imported first by the server that workers are forked from: Python's collector leaves alone what was imported there.

A worker's first full round went through all objects of torch, and so copied every page that they are on: 0.3 s of CPU
and about 150 MB for each worker, at some moment of its training. And the imports take a sixth less without rounds.
"""

from __future__ import annotations

import gc
import os

_SERVER = os.getpid()


def _before_fork() -> None:
    if os.getpid() == _SERVER:
        gc.freeze()


def _in_worker() -> None:
    if os.getppid() == _SERVER:  # what a worker forks, as a data loader does, is its own affair
        gc.enable()


gc.disable()
os.register_at_fork(before=_before_fork, after_in_child=_in_worker)
