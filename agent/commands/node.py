"""`openrecycle train` on a node that does not lead: it works for the one that does."""

from __future__ import annotations

import signal

import typer

from openrecycle.agent.nodes.role import NodeRole
from openrecycle.agent.processes import preload, start_server
from openrecycle.agent.workload import WorkloadSource
from openrecycle.planner.errors import InputError

PATIENCE_SECONDS = 600.0


def serve_node(role: NodeRole, token: str | None, address: str | None, workload: WorkloadSource) -> None:
    """Until the job is over; ends the program with its exit status: 0, or 1 when the lead is lost.

    workload: what the lead will most likely ask for; its modules are imported meanwhile.
    """
    start_server(preload(workload))
    from openrecycle.agent.nodes.server import LeadLost, NodeServer
    from openrecycle.agent.nodes.wire import find_lead

    lead = (role.host, role.port)
    if role.store is not None:
        try:
            lead = find_lead(role.store)
        except RuntimeError:
            raise InputError("--lead", None, f"HOST:PORT, since torchrun's store at {role.host} names none") from None
    server = NodeServer(role.rank, lead, token, address, lambda text: typer.echo(text, err=True))
    stopped: list[int] = []

    def stop(number: int, _frame: object) -> None:
        stopped.append(number)
        server.stop(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        typer.echo(server.run(PATIENCE_SECONDS))
    except LeadLost as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(128 + stopped[0] if stopped else 1) from None
