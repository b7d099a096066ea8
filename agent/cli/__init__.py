"""Command line of the agent: `openrecycle train`. Each command has a module of its own."""

from __future__ import annotations

import typer

from openrecycle.agent.cli import launch, profile
from openrecycle.planner.output import run

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def callback() -> None:
    """Training processes that survive the death of their peers."""


app.command("train")(launch.launch)
app.command("launch", hidden=True)(launch.launch)
app.command("profile")(profile.profile_command)


def main() -> None:
    run(app)
