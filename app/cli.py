"""The command line: `openrecycle serve`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from openrecycle.agent.coordination.membership import FailureTimeouts
from openrecycle.app.history.commands import install as install_histories
from openrecycle.app.runtime.errors import SettingsError
from openrecycle.app.security.oidc import read_oidc
from openrecycle.app.security.token_cli import tokens
from openrecycle.app.settings import RetentionLimits, Settings, read_token, seconds
from openrecycle.planner.commands.output import run as run_command
from openrecycle.planner.jobs.errors import PlannerError

cli = typer.Typer(
    help="The console: watch and repair training jobs from a browser.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

cli.add_typer(tokens, name="token")
install_histories(cli)

_DEFAULT = FailureTimeouts()

Host = Annotated[str, typer.Option(help="Address to listen on. Any but loopback needs a token.")]
Port = Annotated[int, typer.Option(help="Port; 0 takes any free one.")]
DatabaseUrl = Annotated[
    str,
    typer.Option(
        envvar="DATABASE_URL",
        help="sqlite:///path or postgresql://user:password@host/name. Default: a file in the user's state folder.",
        show_envvar=True,
        show_default=False,
    ),
]


@cli.command()
def serve(
    host: Host = "127.0.0.1",
    port: Port = 8501,
    database_url: DatabaseUrl = "",
    token_file: Annotated[
        Path | None, typer.Option(help="File (mode 0600) with the token; else OPENRECYCLE_TOKEN.")
    ] = None,
    host_name: Annotated[
        list[str] | None, typer.Option(help="Host name under which it is reached, through a proxy, say.")
    ] = None,
    proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address or network of a proxy that says who the client is. Default: this machine."),
    ] = None,
    connections_per_address: Annotated[
        int, typer.Option(help="Connections that one address may have, proxies apart. Default: half of all.")
    ] = 0,
    oidc: Annotated[
        Path | None, typer.Option(help="TOML file (mode 0600) with Streamlit's [auth]: people sign in with an account.")
    ] = None,
    oidc_operators: Annotated[
        str, typer.Option(help="Who may operate: ada@x.org,*@ops.x.org,group:NAME.", show_default=False)
    ] = "",
    oidc_viewers: Annotated[str, typer.Option(help="Who may look on, in the same form.", show_default=False)] = "",
    api_only: Annotated[bool, typer.Option("--api-only", help="Serve the REST API without the pages.")] = False,
    advertise: Annotated[
        str,
        typer.Option(
            help="Address of this console for people, where another one is its standby. Default: host and port."
        ),
    ] = "",
    heartbeat: Annotated[float, typer.Option(help="Seconds between two reports of a worker.")] = _DEFAULT.heartbeat,
    suspect: Annotated[float, typer.Option(help="Seconds of silence that make a suspect.")] = _DEFAULT.suspect,
    dead: Annotated[float, typer.Option(help="Seconds of silence after which a worker is out.")] = _DEFAULT.dead,
    tolerance: Annotated[
        int, typer.Option(min=0, max=8, help="Plans are made ahead for up to this many failures.")
    ] = 2,
    keep_seconds: Annotated[str, typer.Option(help="How long a worker's samples of one second are kept.")] = "15m",
    keep_minutes: Annotated[str, typer.Option(help="Those of one minute.")] = "2d",
    keep_hours: Annotated[str, typer.Option(help="Those of one hour.")] = "400d",
    keep_events: Annotated[
        int, typer.Option(help="Lines of each job's event feed that are kept.")
    ] = RetentionLimits.events,
) -> None:
    """Serve the pages and the REST API until Ctrl-C."""
    from openrecycle.app.server import serve as run
    from openrecycle.db.session import DatabaseError

    try:
        settings = Settings(
            host=host,
            port=port,
            database_url=database_url,
            token=read_token(token_file),
            failure_timeouts=FailureTimeouts(heartbeat=heartbeat, suspect=suspect, dead=dead),
            tolerance=tolerance,
            api_only=api_only,
            names=tuple(host_name or ()),
            proxies=tuple(proxy or Settings.proxies),
            connections_per_address=connections_per_address,
            oidc=None if oidc is None else read_oidc(oidc, _listed(oidc_operators), _listed(oidc_viewers)),
            keep=RetentionLimits(
                seconds=seconds(keep_seconds, "--keep-seconds"),
                minutes=seconds(keep_minutes, "--keep-minutes"),
                hours=seconds(keep_hours, "--keep-hours"),
                events=keep_events,
            ),
            advertise=advertise,
        )
        run(settings)
    except (SettingsError, PlannerError, DatabaseError) as error:
        fail(str(error))


@cli.command()
def demo(
    host: Host = "127.0.0.1",
    port: Port = 8501,
    database_url: DatabaseUrl = "",
    pipelines: Annotated[int, typer.Option(help="Data-parallel pipelines.")] = 3,
    stages: Annotated[int, typer.Option(help="Pipeline stages.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per pipeline and iteration.")] = 6,
    iterations: Annotated[int, typer.Option(help="Iterations to commit; the default is some days' worth.")] = 1_000_000,
    layers: Annotated[int, typer.Option(help="Of the model; each is on one stage, and may move to another.")] = 44,
    pace: Annotated[
        str, typer.Option(help="Each op of a layer is stretched to this; the computation inside is real.")
    ] = "F=4ms,I=4ms,W=4ms",
) -> None:
    """Serve the console and run a real training job of 12 processes here, until Ctrl-C."""
    from openrecycle.app.demo import DemoOptions, run

    grid = ("--pipelines", str(pipelines), "--stages", str(stages), "--micro-batches", str(micro_batches))
    model = {"layers": layers, "width": 8, "heads": 1, "sequence": 4, "batch": 1}  # two cores run all 12 workers
    workload = ("--workload-options", json.dumps(model))
    job = ("--name", "demo GPT", "--iterations", str(iterations), "--pace", pace, "--pace-per", "layer", *workload)
    database = ("--database-url", database_url) if database_url else ()
    try:
        status = run(DemoOptions(host, port, database, grid + job), lambda line: print(line, flush=True))
    except SettingsError as error:
        fail(str(error))
    raise SystemExit(status)


def main() -> None:
    """Runs the command line; what it does not know is refused in one sentence."""
    run_command(cli)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part for part in (part.strip() for part in text.split(",")) if part)


def fail(sentence: str) -> NoReturn:
    """One sentence on stderr, exit status 2."""
    print(sentence, file=sys.stderr)
    raise SystemExit(2)
