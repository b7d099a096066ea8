"""Finds out which of a job's nodes this launcher is: from its options, or from what torchrun, srun or Kubernetes
say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from openrecycle.agent.messages.protocol import is_loopback
from openrecycle.planner.jobs.errors import InputError

DEFAULT_PORT = 29431
MAX_NODES = 4096
MIN_TOKEN = 16
"""The least number of characters, as for the console's token."""
_LEAD_KEY = "openrecycle/lead-port"
_STORE_SECONDS = 600.0


@dataclass(frozen=True)
class NodeRole:
    """Which node this is, and where to find the leader. Node 0 (`rank`) leads first. host, port: where the leader
    listens; port 0: a free one, which nodes learn from torchrun's own store at `store`."""

    nodes: int
    rank: int
    host: str
    port: int
    store: tuple[str, int] | None = None

    @property
    def leads(self) -> bool:
        return self.rank == 0


class LedElsewhere(Exception):
    """This launcher was to lead, but another one leads the job already: it comes back to the job as another node."""

    def __init__(self, host: str, port: int) -> None:
        self.lead = host, port
        super().__init__(f"the job is led from {host}:{port}: this node joins it")


def role_of(env: Mapping[str, str], nodes: int | None, rank: int | None, lead: str | None) -> NodeRole | None:
    """Returns which node this is; None: the job has only one. Options win over the environment. Raises InputError."""
    if nodes is not None:
        rank = _rank_of(env) if rank is None else rank
        if nodes == 1:
            return None
        if not 2 <= nodes <= MAX_NODES:
            raise InputError("--nodes", nodes, f"a whole number from 1 to {MAX_NODES}")
        if rank is None or not 0 <= rank < nodes:
            raise InputError("--node-rank", rank, f"a whole number from 0 to {nodes - 1}")
        if lead is None:
            raise InputError("--lead", lead, "HOST:PORT of node 0, as every node can reach it")
        return NodeRole(nodes, rank, *_address(lead))
    for option, value in (("--node-rank", rank), ("--lead", lead)):
        if value is not None and not (option == "--lead" and "SLURM_STEP_ID" in env):
            raise InputError(option, value, "--nodes beside it")
    return _torchrun(env) or _slurm(env, lead)


def is_single(env: Mapping[str, str], nodes: int | None) -> bool:
    """Is this a command for one machine? One for several nodes may also run on one: what they need does no harm."""
    return nodes is None and "TORCHELASTIC_RUN_ID" not in env and "SLURM_STEP_ID" not in env


def check_alone(env: Mapping[str, str]) -> None:
    """Raises InputError if torchrun or srun has started several processes of a script that starts its workers itself:
    each would train a job of its own."""
    if "TORCHELASTIC_RUN_ID" in env:
        by, count = "torchrun", env.get("WORLD_SIZE", "1")
    elif "SLURM_STEP_ID" in env:  # not in a batch script, whose allocation may be of many tasks
        by, count = "srun", env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "1")
    else:
        return
    if re.fullmatch(r"[0-9]{1,7}", count) and int(count) > 1:
        raise InputError(
            "fit",
            f"one of {count} processes that {by} started",
            "a script that plain `python` starts once: it starts its workers itself, and each of these processes "
            "would train a whole job of its own; on several machines, `openrecycle train --workload MODULE:FUNCTION`",
        )


def check_token(role: NodeRole, token: str | None) -> None:
    """Raises InputError if the nodes would talk over a network without a token, or with one that can be guessed: anyone
    who sees a handshake may try tokens on it for as long as they like."""
    if token and (len(token) < MIN_TOKEN or not token.isprintable()):
        raise InputError("OPENRECYCLE_TOKEN", f"{len(token)} characters", f"at least {MIN_TOKEN}, all printable")
    if not token and not is_loopback(role.host):
        raise InputError(
            "OPENRECYCLE_TOKEN", None, f"a shared secret, the same on every node, since {role.host} is not loopback"
        )


def _torchrun(env: Mapping[str, str]) -> NodeRole | None:
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    nodes, rank = _number(env, "GROUP_WORLD_SIZE"), _number(env, "GROUP_RANK")
    if _number(env, "LOCAL_WORLD_SIZE") != 1:
        raise InputError("--nproc-per-node", env.get("LOCAL_WORLD_SIZE"), "1: the launcher starts the workers itself")
    if nodes == 1:
        return None
    host = env.get("MASTER_ADDR", "")
    return NodeRole(nodes, rank, host, 0, (host, _number(env, "MASTER_PORT")))


def _slurm(env: Mapping[str, str], lead: str | None) -> NodeRole | None:
    """Returns the role of a node inside srun. The leader is the first host of the step, at DEFAULT_PORT, unless `lead`
    says otherwise."""
    if "SLURM_STEP_ID" not in env or "SLURM_NODEID" not in env:
        return None
    nodes = _number(env, "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES")
    if nodes == 1:
        return None
    if (tasks := env.get("SLURM_STEP_NUM_TASKS", str(nodes))) != str(nodes):
        given = f"{tasks} tasks on {nodes} nodes"
        raise InputError("--ntasks-per-node", given, "1 task a node: the launcher starts the workers itself")
    if lead is None:
        hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
        lead = f"{first_host(hosts)}:{DEFAULT_PORT}"
    return NodeRole(nodes, _number(env, "SLURM_NODEID"), *_address(lead))


def first_host(hosts: str) -> str:
    """Returns the first host of a Slurm list: `gpu[007-009,12],login` gives gpu007. Raises InputError."""
    match = re.match(r"[A-Za-z0-9_.-]+(?:[A-Za-z0-9_.-]|\[[0-9]+[^\]]*\])*", hosts.strip())
    if not match:
        raise InputError("SLURM_JOB_NODELIST", hosts, "a list of hosts such as gpu[001-004]")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[0])


def _rank_of(env: Mapping[str, str]) -> int | None:
    """Returns the number that a Kubernetes Indexed Job gives its pod; None: there is none."""
    return _number(env, "JOB_COMPLETION_INDEX") if "JOB_COMPLETION_INDEX" in env else None


def _number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "")
    if not re.fullmatch(r"[0-9]{1,7}", value):
        raise InputError(name, value or None, "a whole number in the environment")
    return int(value)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if (
        not re.fullmatch(r"[A-Za-z0-9_.-]{1,253}", host)
        or not re.fullmatch(r"[0-9]{1,5}", port)
        or not 1 <= int(port) <= 65535
    ):
        raise InputError("--lead", text, "HOST:PORT such as 10.0.0.5:29431")
    return host, int(port)


def publish_lead(store: tuple[str, int], port: int) -> None:
    """Tells all nodes of torchrun at which port the leader listens. store: torchrun's own, on its node 0."""
    _store(store).set(_LEAD_KEY, str(port).encode())


def find_lead(store: tuple[str, int]) -> tuple[str, int]:
    """Waits for `publish_lead`, and returns where the leader listens. Raises RuntimeError (torch's) if it does not
    come."""
    return store[0], int(_store(store).get(_LEAD_KEY))


def _store(address: tuple[str, int]) -> Any:
    import torch.distributed  # imported here, since the command line's help does without it

    distributed: Any = torch.distributed
    host, port = address
    return distributed.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_STORE_SECONDS)
    )
