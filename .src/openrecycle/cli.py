"""The command `openrecycle`. In a clone `python -m agent`, `app` and `planner` run it too."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

_ROOMS = {"agent": "", "app": "[console]", "planner": "[planner]"}
"""For each room, the extra that pip must install for it: what follows the clone's path on pip's command line."""

COMMANDS = {
    "demo": ("app", "The console and a real training job on this machine."),
    "serve": ("app", "The console: pages and REST API."),
    "train": ("agent", "Train through failures, here or on several nodes."),
    "profile": ("agent", "Measure a model's op times, for plans."),
    "plan": ("planner", "Make a plan."),
    "check": ("planner", "Say whether a plan is valid."),
    "simulate": ("planner", "What a job lives through under a failure trace."),
    "catalog": ("planner", "Make plans ahead, for failures that may come."),
    "compare": ("planner", "Plans side by side."),
    "export": ("planner", "A plan in another format."),
    "migrations": ("planner", "Say which workers should change their stage after failures."),
    "schema": ("planner", "The JSON Schema of a plan."),
    "token": ("app", "Make, list and revoke the console's tokens."),
    "history": ("app", "Export, import or delete a job's history."),
}


HISTORY = {
    "export": "Write all that is stored of a job into a file (zip).",
    "import": "Store the job of a file, all of it or nothing.",
    "delete": "Delete a job with everything of it.",
}


def main(room: str | None = None) -> NoReturn:
    """Runs a command line and ends the process. room: the folder whose own one runs; None: `openrecycle COMMAND`."""
    # With the default thresholds, garbage collection takes a sixth of the time that importing torch needs.
    gc.set_threshold(20_000, 20, 50)
    # Avoids the collection that Python makes when it ends: half a second of a processor where torch is loaded.
    atexit.register(gc.freeze)
    if room is None:
        room = _chosen()
    try:
        program = import_module(f"openrecycle.{room}.cli")
    except KeyboardInterrupt:  # this takes seconds on a busy machine
        _end("stopped", 130)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "openrecycle"):
            raise
        _end(f"error: this needs {name}: pip install '<clone of OpenReCycle>{_ROOMS[room]}'", 2)
    try:
        program.main()
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _end("error: this needs torch, which is no dependency: your training code brings its own", 2)
    raise SystemExit(0)


def _chosen() -> str:
    """Return the folder that has the command. The rest of sys.argv is for its own command line."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name == "--version":
        _end(f"openrecycle {version('openrecycle')}", 0)
    if name in ("--help", "-h"):
        _list("openrecycle", {command: text for command, (_, text) in COMMANDS.items()}, 0)
    if name not in COMMANDS:
        _end(f"error: no such command: {name!r}; one of {', '.join(COMMANDS)}", 2)
    sys.argv[0] = "openrecycle"
    if name == "history":
        # The console's command line has these commands beside its others.
        sys.argv[:2] = ["openrecycle history"]
        if sys.argv[1:2] in ([], ["--help"], ["-h"]):
            _list("openrecycle history", HISTORY, 0 if sys.argv[1:] else 2)
        if sys.argv[1] not in HISTORY:
            _end(f"error: no such command: {sys.argv[1]!r}; one of {', '.join(HISTORY)}", 2)
    return COMMANDS[name][0]


def _list(program: str, commands: Mapping[str, str], status: int) -> NoReturn:
    width = max(map(len, commands))
    lines = [f"  {command:{width}}  {text}" for command, text in commands.items()]
    _end("\n".join([f"Usage: {program} COMMAND [OPTIONS]", "", *lines]), status)


def _end(text: str, status: int) -> NoReturn:
    try:
        print(text, file=sys.stderr if status else sys.stdout, flush=True)
    except OSError as error:  # as in planner.output, whose import would take longer than the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not status and not isinstance(error, BrokenPipeError):  # the reader of a pipe (head, a pager) may leave
            print(f"error: standard output can't be written: {error.strerror}", file=sys.stderr)
            status = 2
    raise SystemExit(status)
