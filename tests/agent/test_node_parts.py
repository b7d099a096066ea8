"""Several nodes: who runs where, who is who, and what a connection between them refuses. No processes."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import multiprocessing
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from openrecycle.agent.checkpoints import Identity, Origin
from openrecycle.agent.config.options import Checkpoints, TrainingOptions
from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.jobs.start import make_launcher
from openrecycle.agent.launcher.processes import SpareRank, SpareRanks, Spares, WorkerProcess
from openrecycle.agent.messages import channel
from openrecycle.agent.models.layers import TensorSpec
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.nodes import frames as frames_module
from openrecycle.agent.nodes import pool as pool_module
from openrecycle.agent.nodes import server
from openrecycle.agent.nodes.frames import MAX_MESSAGE_BYTES, Frames, NotTrusted, greet
from openrecycle.agent.nodes.pool import (
    CLOCK_SAMPLES,
    NodeHub,
    RemoteProcess,
    RemoteWorker,
    SpreadPool,
    memory_shared_by,
    open_pool,
    place,
    stand_in,
    wait_for_name,
)
from openrecycle.agent.nodes.role import LedElsewhere, NodeRole, check_alone, check_token, first_host, role_of
from openrecycle.agent.nodes.server import Succession
from openrecycle.agent.nodes.succession import Copy, LeadStatus, Spool, pack, tell
from openrecycle.agent.workers.spec import (
    MACHINE,
    RunSpec,
    WorkerSpec,
    by_name,
    code_of,
    decode_spec,
    encode_spec,
    packages_of,
    same_on_all,
    source_of,
)
from openrecycle.planner.catalogs.catalog import Catalog
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, MemoryLimit, StageProfile, Technique, Worker
from openrecycle.planner.plans.packed import to_text
from tests.agent.changed_options import everything_changed
from tests.agent.consoles import until
from tests.agent.node_leads import GivenProcesses, node_with
from tests.agent.node_runs import free_port
from tests.golden import golden

# -- placement ------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 70))
def test_a_lost_node_takes_no_stage_with_it(pipelines: int, stages: int, nodes: int) -> None:
    job = Job.uniform(pipelines, stages, 1)
    if nodes > pipelines * stages:
        with pytest.raises(InputError, match="--nodes"):
            place(job, nodes)
        return
    homes = place(job, nodes)
    assert set(homes) == set(job.workers()) and set(homes.values()) == set(range(nodes))
    for stage in range(stages):
        replicas = Counter(node for cell, node in homes.items() if cell.stage == stage)
        # As spread as can be: the least that any placement has on its fullest node.
        assert max(replicas.values()) == -(-pipelines // min(nodes, pipelines))
        assert len(replicas) == min(nodes, pipelines)


def test_whole_pipelines_share_a_node_where_they_can() -> None:
    homes = place(Job.uniform(4, 3, 1), 2)
    assert all(len({homes[Worker(p, s)] for s in range(3)}) == 1 for p in range(4))


def test_a_worker_of_a_lost_node_starts_where_its_stage_is_thinnest() -> None:
    homes = place(Job.uniform(3, 2, 1), 3)
    running = {cell: node for cell, node in homes.items() if node != 2}
    assert stand_in(Worker(2, 0), 2, {0, 1}, running) == 0
    running[Worker(2, 0)] = 0
    assert stand_in(Worker(2, 1), 2, {0, 1}, running) == 1
    assert stand_in(Worker(2, 1), 2, {0, 1, 2}, running) == 2, "its own node is back"


# -- who is who -----------------------------------------------------------------------------------

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {"SLURM_STEP_ID": "0", "SLURM_NODEID": "2", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "gpu[07-09]"}


@pytest.mark.parametrize(
    ("env", "options", "role"),
    [
        ({}, (None, None, None), None),
        ({}, (1, None, None), None),
        ({}, (3, 2, "10.0.0.1:1234"), NodeRole(3, 2, "10.0.0.1", 1234)),
        ({"JOB_COMPLETION_INDEX": "1"}, (2, None, "lead.svc:1234"), NodeRole(2, 1, "lead.svc", 1234)),
        (TORCHRUN, (None, None, None), NodeRole(4, 1, "10.0.0.1", 0, ("10.0.0.1", 29500))),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, (None, None, None), None),
        (SLURM, (None, None, None), NodeRole(3, 2, "gpu07", 29431)),
        (SLURM, (None, None, "ib0-gpu07:5000"), NodeRole(3, 2, "ib0-gpu07", 5000)),
        # A shell inside an allocation, not a step: one node.
        ({"SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "gpu[07-09]"}, (None, None, None), None),
    ],
)
def test_the_role_comes_from_options_or_environment(
    env: dict[str, str], options: tuple[int | None, int | None, str | None], role: NodeRole | None
) -> None:
    assert role_of(env, *options) == role


@pytest.mark.parametrize(
    ("env", "options", "field"),
    [
        ({}, (0, 0, "h:1"), "--nodes"),
        ({}, (2, 2, "h:1"), "--node-rank"),
        ({}, (2, None, "h:1"), "--node-rank"),
        ({}, (2, 0, None), "--lead"),
        ({}, (2, 0, "nowhere"), "--lead"),
        ({}, (2, 0, "h:99999"), "--lead"),
        ({}, (None, 1, None), "--nodes beside"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, (None, None, None), "--nproc-per-node"),
        (TORCHRUN | {"GROUP_RANK": "x"}, (None, None, None), "GROUP_RANK"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "24"}, (None, None, None), "--ntasks-per-node"),
    ],
)
def test_what_makes_no_role_is_named(
    env: dict[str, str], options: tuple[int | None, int | None, str | None], field: str
) -> None:
    with pytest.raises(InputError, match=field):
        role_of(env, *options)


TORCHRUN_OF_8 = TORCHRUN | {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"}
SRUN_OF_3 = SLURM | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("env", "started"),
    [
        (TORCHRUN_OF_8, golden("8-processes-that-torchrun-started")),
        (SRUN_OF_3, "3 processes that srun started"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "3"}, "3 processes that srun started"),
    ],
)
def test_a_script_that_starts_its_workers_is_started_once(env: dict[str, str], started: str) -> None:
    with pytest.raises(InputError, match=started):
        check_alone(env)


@pytest.mark.parametrize(
    "env",
    [
        {},
        TORCHRUN | {"WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"},
        SRUN_OF_3 | {"SLURM_STEP_NUM_TASKS": "1"},
        # A batch script in an allocation of three tasks, and a program that only counts itself.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"},
        {"WORLD_SIZE": "8", "RANK": "0"},
    ],
)
def test_a_script_that_is_started_once_is_not_refused(env: dict[str, str]) -> None:
    check_alone(env)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu[007-009,12],login", "gpu007"),
        ("a-1.site,b", "a-1.site"),
        ("r[3]n[07-9,2]-x[1],y", "r3n07-x1"),
    ],
)
def test_the_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_off_loopback_a_token_is_needed() -> None:
    with pytest.raises(InputError, match="OPENRECYCLE_TOKEN"):
        check_token(NodeRole(2, 0, "10.0.0.1", 1), None)
    check_token(NodeRole(2, 0, "10.0.0.1", 1), "a secret of 20 signs")
    for host in ("10.0.0.1", "127.0.0.1"):
        with pytest.raises(InputError, match="at least 16"):
            check_token(NodeRole(2, 0, host, 1), "secret")
    check_token(NodeRole(2, 0, "127.0.0.1", 1), None)


# -- the connection -------------------------------------------------------------------------------


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


Wire = tuple[socket.socket, socket.socket]


def both(wire: Wire, lead_token: str, node_token: str) -> tuple[Any, Any]:
    """What the handshake gives on either side: Frames, or the exception."""
    out: dict[str, Any] = {}

    def run(side: Any, connection: socket.socket, token: str) -> None:
        try:
            out[side] = greet(connection, token, side)
        except (OSError, NotTrusted) as error:
            out[side] = error
            connection.close()

    node = threading.Thread(target=run, args=("node", wire[1], node_token))
    node.start()
    run("lead", wire[0], lead_token)
    node.join()
    return out["lead"], out["node"]


def test_messages_go_both_ways(wire: Wire) -> None:
    lead, node = both(wire, "secret", "secret")
    lead.send({"kind": "a", "text": "ä" * 1000})
    node.send({"kind": "b"})
    lead.send({"kind": "c"})
    assert [node.receive()["kind"], node.receive()["kind"], lead.receive()["kind"]] == ["a", "c", "b"]


def test_another_token_is_refused_by_both(wire: Wire) -> None:
    lead, node = both(wire, "secret", "guess")
    assert isinstance(lead, NotTrusted) and isinstance(node, NotTrusted)


@pytest.mark.parametrize("attack", ["altered", "replayed", "reflected"])
def test_only_the_other_sides_next_message_is_taken(attack: str, wire: Wire) -> None:
    lead, node = both(wire, "secret", "secret")
    lead.send({"kind": "start"})
    sealed = wire[1].recv(1 << 16)
    # Nothing of a message can be read on its way.
    assert b"kind" not in sealed and b"start" not in sealed
    if attack == "altered":
        wire[0].sendall(sealed[:-1] + bytes([sealed[-1] ^ 1]))
    elif attack == "replayed":
        wire[0].sendall(sealed + sealed)
        assert node.receive() == {"kind": "start"}
    else:
        wire[1].sendall(sealed)
        node = lead
    with pytest.raises(NotTrusted):
        node.receive()


def test_messages_have_a_limit(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    lead, node = both(wire, "secret", "secret")
    with pytest.raises(ValueError, match=golden("can-be-sent")):
        lead.send({"text": "x" * MAX_MESSAGE_BYTES})
    lead.send({"text": "x" * 1000})
    monkeypatch.setattr(frames_module, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(NotTrusted, match="are taken"):
        node.receive()


def test_long_messages_cross(wire: Wire) -> None:
    """Each side sends more than a socket holds while it receives."""
    lead, node = both(wire, "secret", "secret")
    message = {"text": "x" * (8 << 20)}
    senders = [threading.Thread(target=side.send, args=(message,)) for side in (lead, node)]
    received: list[dict[str, Any]] = []
    receivers = [threading.Thread(target=lambda s=side: received.append(s.receive())) for side in (lead, node)]
    for thread in (*senders, *receivers):
        thread.start()
    for thread in (*senders, *receivers):
        thread.join(60)
    assert received == [message, message]


def test_two_messages_at_once_are_both_there_to_take(wire: Wire) -> None:
    lead, node = both(wire, "secret", "secret")
    assert not node.waiting
    lead.send({"number": 1})
    lead.send({"number": 2})
    until(lambda: len(wire[1].recv(1 << 16, socket.MSG_PEEK)) > 60, "both to have come", 5)
    assert node.receive() == {"number": 1} and node.waiting
    assert node.receive() == {"number": 2} and not node.waiting


class Hours:
    """A clock on which an hour passes each time that it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 3600
        return self.now


def test_what_has_come_is_taken_without_waiting(wire: Wire) -> None:
    lead, node = both(wire, "secret", "secret")
    assert lead.take() is None
    text = b'{"kind": "slow"}'

    for data in (struct.pack(">I", len(text)), text[:5]):
        node.write(data)
        assert wait([lead], 5) and lead.take() is None and not lead.waiting
    node.write(text[5:])
    assert wait([lead], 5) and lead.take() == {"kind": "slow"}
    node.send({"kind": "one"})
    node.send({"kind": "two"})
    for kind in ("one", "two"):
        assert until(lead.take, "it to come", 5) == {"kind": kind}
    assert not lead.waiting
    node.write(struct.pack(">I", len(text)))
    node.close()
    with pytest.raises((OSError, NotTrusted)):
        until(lead.take, "the end", 20)


@pytest.mark.parametrize("take", [True, False])
def test_a_side_that_stands_still_within_a_message_is_waited_for(
    take: bool, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as between two messages: its launcher is suspended, or this one was."""
    lead, node = both(wire, "secret", "secret")
    monkeypatch.setattr(frames_module, "time", Hours())
    text = b'{"kind": "slow"}'
    parts = struct.pack(">I", len(text)), text[:5], text[5:]
    if take:
        for part in parts[:-1]:
            node.write(part)
            assert wait([lead], 5) and lead.take() is None and lead.take() is None
        node.write(parts[-1])
        assert wait([lead], 5) and lead.take() == {"kind": "slow"}
    else:
        with ThreadPoolExecutor(1) as other:
            message = other.submit(lead.receive)
            for part in parts:
                node.write(part)
                until(lambda: not wait([lead], 0), "the other thread to take it", 5)
            assert message.result(5) == {"kind": "slow"}


def test_a_certificate_holds_for_a_clock_that_has_never_been_set(wire: Wire) -> None:
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE

    def welcome() -> None:
        with pytest.raises(NotTrusted):
            greet(wire[0], "secret", "lead")

    lead = threading.Thread(target=welcome)
    lead.start()
    with stranger.wrap_socket(wire[1]) as connection:
        shown = connection.getpeercert(binary_form=True)
    lead.join(10)
    assert shown is not None
    assert x509.load_der_x509_certificate(shown).not_valid_before_utc.timestamp() == 0


def test_whoever_shows_no_certificate_is_no_node(wire: Wire) -> None:
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE

    def connect() -> None:
        with contextlib.suppress(OSError), stranger.wrap_socket(wire[1]) as connection:
            assert connection.recv(1) == b""

    thread = threading.Thread(target=connect)
    thread.start()
    with pytest.raises(NotTrusted, match="no certificate"):
        greet(wire[0], "secret", "lead")
    wire[0].close()
    thread.join(10)


def test_what_is_no_tls_is_refused(wire: Wire) -> None:
    wire[1].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises(NotTrusted, match="TLS"):
        greet(wire[0], "secret", "lead")


def test_an_older_version_of_tls_is_refused(wire: Wire) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2

    def connect() -> None:
        with contextlib.suppress(OSError):
            old.wrap_socket(wire[1])

    thread = threading.Thread(target=connect)
    thread.start()
    with pytest.raises(NotTrusted, match="TLS"):
        greet(wire[0], "secret", "lead")
    wire[0].close()
    thread.join(10)


def test_another_version_of_the_messages_is_refused(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are made once for each token: for this one the node's has the other version."""
    offer = ssl.SSLContext.set_alpn_protocols

    def offer_old(context: ssl.SSLContext, protocols: list[str]) -> None:
        offer(context, ["openrecycle-nodes/1"] if context.protocol is ssl.PROTOCOL_TLS_CLIENT else protocols)

    monkeypatch.setattr(ssl.SSLContext, "set_alpn_protocols", offer_old)
    lead, node = both(wire, "of another version", "of another version")
    assert isinstance(lead, NotTrusted) and isinstance(node, NotTrusted)


def test_a_connection_that_ends_says_so(wire: Wire) -> None:
    lead, node = both(wire, "", "")
    lead.close()
    with pytest.raises(OSError, match="closed"):
        node.receive()
    assert isinstance(node, Frames)


# -- what is said over it -------------------------------------------------------------------------


def spec_of(workload: Any) -> WorkerSpec:
    job = dataclasses.replace(
        Job.uniform(2, 3, 4, durations={"F": 0.1, "I": 1 / 8}, time_unit="ms"),
        profiles=(StageProfile(0.123, reductions=(0.0, 1.5)),) * 3,
        speeds=((Worker(1, 2), 0.5),),
    )
    stage_io = ((TensorSpec((2, 3), "float32"), TensorSpec((2,), "int64", False)),) * 2
    options = everything_changed(job=job)
    origin = Origin(Identity("a:b", 6, 3, 2, 4, 1), "folder/3", 3)
    run = RunSpec(options, workload, (2, 1, 3), stage_io, origin, 0.5, True)
    return WorkerSpec(Worker(1, 2), "abc", run, True, threads=2, address="10.0.0.7")


class Drawn(Gpt):
    """Draws as it is made, without a seed."""

    def __init__(self) -> None:
        super().__init__(width=32, heads=2, sequence=16, batch=2)
        self.drawn = torch.rand(4).tolist()


def test_a_workload_is_the_same_each_time_it_is_loaded() -> None:
    """Also where its making draws parameters without a seed."""
    run = RunSpec(everything_changed(job=Job.uniform(1, 1, 1)), NamedWorkload(f"{__name__}:Drawn"))
    made: list[Any] = [run.load_workload(), run.load_workload()]
    assert made[0] is not made[1] and made[0].drawn == made[1].drawn


def test_a_worker_is_described_in_json() -> None:
    options = {"width": 32, "big": 2**80, "one": 1.0, "most": math.inf, "deep": [[None, -0.0], {"on": True}]}
    spec = spec_of(NamedWorkload("openrecycle.agent.examples.gpt:Gpt", options))
    document = encode_spec(spec)
    text = json.dumps(document)
    # Slot, rank and where ranks meet are the affair of the node that starts the processes.
    told = {field.name for field in dataclasses.fields(WorkerSpec)} - {"slot", "rank", "meeting"}
    assert document.keys() == told
    again = decode_spec(json.loads(text))
    assert again == spec and repr(again.run.workload) == repr(spec.run.workload)
    for name in told - {"run"}:
        with pytest.raises(ValueError, match=name):
            decode_spec({key: value for key, value in document.items() if key != name})
    for name in document["run"]:
        with pytest.raises(ValueError, match=name):
            decode_spec(document | {"run": {key: value for key, value in document["run"].items() if key != name}})


@pytest.mark.parametrize(
    "change",
    [
        {"worker": "X"},
        {"threads": "many"},
        {"run": {}},
        {"run": {"options": {}}},
        {"run": {"workload": {"options": {}}}},
        {"run": {"heartbeat_seconds": "often"}},
    ],
)
def test_what_describes_no_worker_is_refused(change: dict[str, Any]) -> None:
    document = encode_spec(spec_of(NamedWorkload("a:b")))
    run = document["run"] | change["run"] if change.get("run") else {}
    with pytest.raises(ValueError, match=r"."):
        decode_spec(document | change | ({"run": run} if "run" in change else {}))


def test_a_workload_without_a_name_stays_on_one_node() -> None:
    with pytest.raises(InputError, match="several nodes"):
        by_name(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"rank": 0}, "--node-rank"),
        ({"rank": 3}, "--node-rank"),
        ({"rank": "1"}, "--node-rank"),
        ({"openrecycle": "another"}, "openrecycle another"),
        ({"torch": "1.0"}, "torch 1.0"),
        ({"instruction set": "none"}, "instruction set"),
        ({"workload": "my_job 2"}, "workload my_job 2"),
        ({"workload": "my_job 2"}, golden("give-the-node-the-code")),
    ],
)
def test_the_lead_says_why_a_node_is_turned_away(hello: dict[str, Any], reason: str) -> None:
    said: list[str] = []
    same = MACHINE | {"workload": "my_job 1"}
    hub = NodeHub("127.0.0.1", 0, 3, "", said.append, same=same)
    try:
        with socket.create_connection((hub.host, hub.port)) as connection:
            frames = greet(connection, "", "node")
            frames.send({"rank": 1, "address": "127.0.0.1"} | same | hello)
            answer = frames.receive()
        assert answer["kind"] == "refused" and reason in answer["reason"]
        with pytest.raises(InputError, match="missing: node 1, 2"):
            hub.wait_for_all(0.01)
    finally:
        hub.close("test")


def test_a_version_of_the_program_is_known_by_its_code(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    seen = set[str]()
    for path, text in ((inner / "a.py", "1"), (inner / "a.py", "2"), (tmp_path / "b.py", "2"), (inner / "b.py", "2")):
        path.write_text(text)
        (tmp_path / "notes.txt").write_text(text * len(seen))
        seen.add(source_of(tmp_path))
        assert source_of(tmp_path) in seen
    assert len(seen) == 4


def test_a_script_is_known_by_its_code_and_that_of_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {
        "a_job.py": "import json, torch\nfrom a_model import layers\nimport a_package.deep",
        "a_model.py": "def layers():\n    from a_late_one import x",
        "a_late_one.py": "x = 1",
        "a_package/__init__.py": "",
        "a_package/deep.py": "from . import beside\nfrom .beside import *",
        "a_package/beside.py": "y = 1",
        "a_stranger.py": "z = 1",
        "a_package/stranger.py": "z = 1",
    }
    (tmp_path / "a_package").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = code_of("a_job")
    assert before and code_of("a_job") == before
    for name in files:
        (tmp_path / name).write_text(f"{files[name]}\n# changed")
        assert (code_of("a_job") == before) == ("stranger" in name), name
        (tmp_path / name).write_text(files[name])
    assert code_of("a_package.deep") not in ("", before)
    (tmp_path / "a_model.py").write_text("no python (")
    assert code_of("a_job") not in ("", before)
    assert code_of("not_there") == code_of("openrecycle.agent.examples.gpt") == ""


def test_what_is_beside_a_script_but_not_the_user_s_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --target` puts packages there: to read all of torch took a minute."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_job_there.py").write_text("import a_library, another_one, a_model_there")
    for name in ("a_library", "a_library-1.0.dist-info"):
        (tmp_path / name).mkdir()
    library, model = tmp_path / "a_library" / "__init__.py", tmp_path / "a_model_there.py"
    record = "a_library/__init__.py,sha256=x,9\nanother_one.py,,\na_library-1.0.dist-info/RECORD,,\n"
    (tmp_path / "a_library-1.0.dist-info" / "RECORD").write_text(record)
    before = code_of("a_job_there")
    library.write_text("x = 1")
    (tmp_path / "another_one.py").write_text("x = 1")
    assert code_of("a_job_there") == before
    assert code_of("a_library") not in ("", before)
    model.write_text("x = 1")
    assert code_of("a_job_there") != before


@pytest.mark.parametrize("beside", [True, False])
def test_a_script_is_known_by_the_versions_of_what_it_imports(
    beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of another version of transformers may compute something else."""
    script, library = tmp_path / "a", tmp_path / "a" if beside else tmp_path / "b"
    about = library / "lib_of_a_job-1.0.dist-info"
    about.mkdir(parents=True)
    script.mkdir(exist_ok=True)
    for folder in {script, library}:
        monkeypatch.syspath_prepend(str(folder))
    (script / "a_job_with_a_library.py").write_text("import os.path, torch\nfrom a_lib.deep import x")
    (library / "a_lib").mkdir()
    (library / "a_lib" / "__init__.py").write_text("")
    (about / "RECORD").write_text("a_lib/__init__.py,,\n")
    for version in ("1.0", "1.1"):
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lib-of-a-job\nVersion: {version}\n")
        assert packages_of("a_job_with_a_library") == [f"lib-of-a-job {version}"]
        told = same_on_all(NamedWorkload("a_job_with_a_library:x"))
        assert told["packages"] == f"lib-of-a-job {version}"
    assert packages_of("a_lib.deep") == [f"lib-of-a-job {version}"]
    assert packages_of("not_there", "openrecycle.agent.examples.gpt") == []


def test_a_neighbour_that_can_t_be_read_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have the name of an installed package, which is imported in its place; or nobody imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_job_with_such.py").write_text("import torch, too_deep")
    (tmp_path / "too_deep.py").write_text("x = " + "+".join(["1"] * 20_000))
    refused = []

    def read_bytes(file: Path) -> bytes:
        if file.parent.name == "torch":
            refused.append(file)
            raise PermissionError(errno.EACCES, "Permission denied")
        with file.open("rb") as there:
            return there.read()

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert code_of("a_job_with_such") and refused


def test_what_an_editor_leaves_beside_the_code_makes_no_other_version(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    version = source_of(tmp_path)
    (tmp_path / ".#a.py").symlink_to("user@host.123:1")
    (tmp_path / "b.py").symlink_to("nowhere")
    (tmp_path / "c.py").mkdir()
    notebooks = tmp_path / ".ipynb_checkpoints"
    notebooks.mkdir()
    (notebooks / "a-checkpoint.py").write_text("0")
    assert source_of(tmp_path) == version


def test_the_lead_waits_until_its_own_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod that runs before the name server knows it."""
    known, asked, said = socket.getaddrinfo, list[object](), list[str]()

    def later(*arguments: Any, **options: Any) -> Any:
        if arguments[0] != "points-0.points":  # asked by what else runs here
            return known(*arguments, **options)
        asked.append(arguments)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known("127.0.0.1", 0)

    monkeypatch.setattr(socket, "getaddrinfo", later)
    wait_for_name("points-0.points", 29431, said.append, 5.0)
    assert len(asked) == 3 and len(said) == 1 and "points-0.points" in said[0]
    asked.clear()

    def never(*arguments: Any, **options: Any) -> Any:
        asked.clear()
        return later(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", never)
    wait_for_name("points-0.points", 29431, said.append, 0.2)
    assert len(said) == 2, "it does not wait for ever"


def fake_node(at: tuple[str, int], offset: int = 0, begun: bool = False, **about: Any) -> Frames:
    """A node that comes, with a clock that is `offset` ns ahead, and then does nothing. begun: has the job?"""
    frames = greet(socket.create_connection(at), "", "node")
    frames.send({"rank": 1, "address": "127.0.0.1"} | MACHINE | about)
    welcome = frames.receive()
    assert (welcome["kind"], welcome["begun"]) == ("welcome", begun)
    for _ in range(CLOCK_SAMPLES):
        assert frames.receive() == {"kind": "clock"}
        frames.send({"kind": "clock", "at": time.monotonic_ns() + offset})
    return frames


@pytest.mark.parametrize(
    ("shared_by", "workers"),
    [
        ("another", [Worker(1, 0)]),
        pytest.param(
            *(memory_shared_by(), [Worker(0, 0), Worker(1, 0)]),
            marks=pytest.mark.skipif(not memory_shared_by(), reason="unknown"),
        ),
    ],
    ids=["another machine", "this one"],
)
def test_a_node_that_has_too_little_memory_is_known_before_the_start(shared_by: str, workers: list[Worker]) -> None:
    """All nodes have come by then; the job does not start, and they are told so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        front = listener.getsockname()
    job, asked, ended = Job.uniform(2, 1, 1), list[tuple[Any, ...]](), list[dict[str, Any]]()
    workload = NamedWorkload("tests.agent.nan_model:NanModel")

    def node() -> None:
        until(lambda: _listens(front), "the lead to listen", 20)
        frames = fake_node(front, memory=1000, memory_shared_by=shared_by, **same_on_all(workload))
        while not ended:
            if (message := frames.receive())["kind"] == "over":
                ended.append(message)

    def fits(workers: Any, has: int | None, where: str) -> str:
        asked.append((list(workers), has))
        raise InputError("job", where, "more memory")

    thread = threading.Thread(target=node, daemon=True)
    thread.start()
    role = NodeRole(2, 0, *front)
    with pytest.raises(InputError, match="1"):
        open_pool(role, job, workload, None, lambda _: None, fits)
    thread.join(20)
    assert asked == [(workers, 1000)] and ended


@pytest.mark.processes
def test_nodes_are_told_that_a_job_does_not_start_once_all_have_come(tmp_path: Path) -> None:
    """They would wait for the lead to come back."""
    front, ended = ("127.0.0.1", free_port()), list[dict[str, Any]]()
    checkpoints = Checkpoints(directory=str(tmp_path), resume="3")  # which is not there
    options = TrainingOptions(job=Job.uniform(2, 1, 1), checkpoints=checkpoints)
    source = NamedWorkload("openrecycle.agent.examples.gpt:Gpt", {"width": 32, "heads": 2, "sequence": 16, "batch": 2})

    def node() -> None:
        frames = fake_node(front, **same_on_all(source))
        ended.append(frames.receive())
        frames.close()

    thread = threading.Thread(target=node, daemon=True)

    def say(text: str) -> None:
        if f"{front[0]}:{front[1]}" in text:  # it listens
            thread.start()

    with pytest.raises(InputError, match=r"checkpoint"):
        make_launcher(options, source, lambda _: None, say, role=NodeRole(2, 0, *front))
    thread.join(20)
    assert [message["kind"] for message in ended] == ["over"]


def test_nodes_of_one_machine_share_its_memory_and_hosts_of_one_name_do_not() -> None:
    hub = NodeHub("127.0.0.1", 0, 4, "", lambda _: None)
    said, nodes = {1: "one", 2: "one", 3: "another"}, list[Frames]()
    try:
        for rank, shared_by in said.items():
            about = {"rank": rank, "memory": 900, "memory_shared_by": shared_by, "host": "localhost"}
            nodes.append(fake_node((hub.host, hub.port), **about))
        until(lambda: len(hub.hosts) == 3, "all to have come", 10)
        homes = {Worker(p, 0): node for p, node in enumerate((0, 1, 2, 2, 3))}
        pool = SpreadPool([], hub, homes)
        found = {machine.workers[0].pipeline: machine for machine in pool.machines}
        assert [found[p].has for p in (1, 2, 4)] == [300, 600, 900]
        assert len({machine.host for machine in pool.machines}) == 4
        ours, theirs = multiprocessing.Pipe(duplex=False)
        entry = RemoteWorker(
            *(Worker(1, 0), "i", RemoteProcess(lambda: None), ours, 0.0), node=cast(Any, SimpleNamespace(rank=1))
        )
        assert pool.host_of(entry, "localhost") == found[1].host, "as a console is told where it is"
        theirs.close()
    finally:
        for node in nodes:
            node.close()
        hub.close("test")


def _listens(at: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(at, 1.0):
        return True
    return False


@pytest.fixture
def hub() -> Iterator[NodeHub]:
    hub = NodeHub("127.0.0.1", 0, 2, "", lambda _: None)
    yield hub
    hub.close("test")


@pytest.mark.parametrize("hour", [3_600_000_000_000, -3_600_000_000_000])
def test_what_a_node_says_arrives_on_the_leads_clock(hour: int, hub: NodeHub) -> None:
    frames = fake_node((hub.host, hub.port), hour)
    hub.wait_for_all(5)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = hub.links[1].start(spec_of(NamedWorkload("a:b")), theirs)
    assert frames.receive()["kind"] == "start"
    now = time.monotonic_ns()
    frames.send({"kind": "from", "incarnation": "abc", "message": {"kind": "ready", "at": now + hour}})
    assert abs(channel.receive(ours)["at"] - now) < 1_000_000_000
    frames.send({"kind": "exited", "incarnation": "abc", "code": -9})
    process.join(5)
    assert process.exitcode == -9 and wait([process.sentinel], 5)
    with pytest.raises(EOFError):
        ours.recv_bytes()


@pytest.mark.parametrize(
    "odd", [pytest.param({1, 2}, id="no JSON"), pytest.param("x" * MAX_MESSAGE_BYTES, id="too long")]
)
def test_what_can_not_be_sent_to_a_worker_ends_that_one_alone(
    odd: Any, hub: NodeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    """As of this node. Others of its node, and the connection with it, stay."""
    frames = fake_node((hub.host, hub.port))
    hub.wait_for_all(5)
    pool = SpreadPool([], hub, {Worker(1, stage): 1 for stage in range(2)})
    run = spec_of(NamedWorkload("a:b")).run
    odd_one, other = (
        pool.start(Worker(1, stage), lambda i: dataclasses.replace(spec_of(NamedWorkload("a:b")), incarnation=i), 0.0)
        for stage in range(2)
    )
    odd_one.post("deployment", plans=odd)
    other.post("over")
    pool.hand_out(run, lambda: None)
    said = [frames.receive(time.monotonic() + 20) for _ in range(4)]
    assert [message["kind"] for message in said[:2]] == ["start", "start"]
    about = {(message["kind"], message["incarnation"]) for message in said[2:]}
    assert about == {("kill", odd_one.incarnation), ("to", other.incarnation)}
    assert "Error" in capfd.readouterr().err and hub.links[1].alive
    frames.close()


def test_a_lost_node_takes_its_workers_along_and_may_come_back(hub: NodeHub) -> None:
    frames = fake_node((hub.host, hub.port))
    hub.wait_for_all(5)
    pool = SpreadPool([], hub, {Worker(1, 2): 1})
    entry = pool.start(Worker(1, 2), lambda incarnation: spec_of(NamedWorkload("a:b")), 0.0)
    assert entry.process.is_alive()
    frames.close()
    assert wait([entry.process.sentinel], 5) and not entry.process.is_alive()
    assert entry.ending == golden("was-lost-with-node-1")
    pool.forget(entry)
    until(lambda: not hub.links, "the lead to forget the node", 5)
    again = fake_node((hub.host, hub.port))
    hub.wait_for_all(5)
    assert pool.start(Worker(1, 2), lambda incarnation: spec_of(NamedWorkload("a:b")), 0.0).process.is_alive()
    spec = again.receive()["spec"]
    assert (spec["address"], spec["node"]) == ("127.0.0.1", 1)


def test_no_process_is_started_on_a_node_that_does_not_answer(hub: NodeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off, or suspended: what it is sent may be lost with it, and would count as a try. It is there, so a worker of
    its own waits for it."""
    node = fake_node((hub.host, hub.port), port=1)
    hub.wait_for_all(5)
    pool, run = SpreadPool([], hub, {Worker(1, 2): 1}), spec_of(NamedWorkload("a:b")).run
    monkeypatch.setattr(pool_module, "ANSWER_SECONDS", 0.0)
    assert pool.has_node(1), "it was asked nothing yet"
    pool.hand_out(run, lambda: {"plan": "plan"})
    assert hub.links[1].alive and not pool.has_node(1)
    copy = node.receive()
    assert copy["kind"] == "copy"
    node.send({"kind": "ack", "number": copy["number"]})
    until(lambda: pool.has_node(1), "the lead to hear it", 5)
    node.close()


def test_who_has_come_to_a_launcher_that_does_not_lead_hears_who_does(hub: NodeHub) -> None:
    """Or it would take the end of the connection for the end of its lead, before it knows the job."""
    node = fake_node((hub.host, hub.port))
    until(lambda: hub.links, "the node to be there", 5)
    tell((hub.host, hub.port), "", {"kind": "led", "lead": ("127.0.0.1", 7)})
    hub.links[1].post({"kind": "more", "text": "x" * (16 << 20)})  # than goes out before the node reads
    with pytest.raises(LedElsewhere):
        hub.wait_for_all(5)

    closing = threading.Thread(target=hub.close, args=("",))
    closing.start()
    heard = [node.receive() for _ in range(2)]
    node.close()
    closing.join(20)
    assert heard[1] == {"kind": "moved", "lead": ["127.0.0.1", 7]} and not closing.is_alive()


class Followers:
    """Nodes 1 and 2 of a job of three, each a launcher that lives wherever its connection is broken: it listens. sent:
    what the lead has sent of what it has decided."""

    def __init__(self) -> None:
        self.hub = NodeHub("127.0.0.1", 0, 3, "", lambda _: None)
        self.ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
        self.nodes: dict[int, Frames] = {}
        for rank in (1, 2):
            self.come(rank, "first", begun=False)
        self.pool, self.sent = SpreadPool([], self.hub, {}), list[int]()
        assert self.decides(0)

    def come(self, rank: int, process: str, *, begun: bool = True, at: int | None = None) -> None:
        before, port = self.hub.links.get(rank), self.ports[rank if at is None else at].getsockname()[1]
        node = fake_node((self.hub.host, self.hub.port), begun=begun, rank=rank, port=port, process=process)
        until(lambda: self.hub.links.get(rank, before) is not before, "the lead to have it", 10)
        threading.Thread(target=self._acknowledge, args=(node,), daemon=True).start()
        self.nodes[rank] = node

    @staticmethod
    def _acknowledge(node: Frames) -> None:
        with contextlib.suppress(OSError, NotTrusted):
            while True:
                if (message := node.receive())["kind"] == "copy":
                    node.send({"kind": "ack", "number": message["number"]})

    def break_off(self, rank: int) -> None:
        self.nodes.pop(rank).close()
        until(lambda: rank not in self.hub.links, "it to be lost", 10)

    def listen(self, rank: int, process: str, *, lead: int, term: int) -> None:
        """From now on that launcher does, at the address of the node."""
        status = LeadStatus(rank, lead=lead, term=term, run=self.hub.lead_status.run, process=process)

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = self.ports[rank].accept()
                    with contextlib.closing(connection), contextlib.suppress(OSError, NotTrusted):
                        frames = greet(connection, "", "lead", time.monotonic() + 5)
                        frames.send(status.answer(frames.receive(time.monotonic() + 5)))

        threading.Thread(target=answer, daemon=True).start()

    def decides(self, number: int) -> bool:
        """Something, and it is sent once those that are there have the newest copy."""
        self.pool.decide(lambda: self.sent.append(number))
        run = spec_of(NamedWorkload("a:b")).run
        assert not self.pool.hand_out(run, lambda: {"plan": "plan"})
        newest = max(link.handed for link in self.hub.links.values())
        until(lambda: all(link.acked >= newest for link in self.hub.links.values()), "all to have it", 10)
        assert not self.pool.hand_out(run, lambda: {"plan": "plan"})
        return number in self.sent

    def close(self) -> None:
        for node in self.nodes.values():  # for whose goodbye the lead would wait
            node.close()
        self.hub.close("test")
        for port in self.ports:
            port.shutdown(socket.SHUT_RDWR)  # whoever accepts there leaves
            port.close()


@pytest.fixture
def followers() -> Iterator[Followers]:
    followers = Followers()
    yield followers
    followers.close()


def test_a_node_that_another_one_has_taken_the_place_of_counts_once_others_know(followers: Followers) -> None:
    """The first one may live, and choose another lead with those that the lead does not hear; also where it is reached
    at the same address, as node 0 is."""
    followers.break_off(2)
    followers.come(2, "second")
    followers.break_off(1)
    assert not followers.decides(1)
    followers.come(1, "first", at=3)
    assert followers.decides(2) and followers.sent == [0, 1, 2]


@pytest.mark.parametrize("lost", [1, 2], ids=["another", "the second one"])
def test_a_node_whose_place_another_one_has_taken_at_its_address_is_known_to_be_gone(
    lost: int, followers: Followers
) -> None:
    """It came too soon for the lead to see that nobody listened there; and is a member, also where it is lost too."""
    first = followers.hub.links[2]
    followers.break_off(2)
    followers.come(2, "second")
    followers.break_off(lost)
    assert followers.decides(1) == (lost == 2)
    followers.listen(2, "second", lead=0, term=1)
    until(lambda: first.forgot, "the lead to ask there", 20)
    assert 2 in followers.hub.members and followers.decides(2)


def test_a_lead_hears_of_the_next_one_also_from_another_process_than_it_knew(followers: Followers) -> None:
    """Cut off, while a node has begun anew at the same address, and follows the lead that the others have chosen. The
    other node says nothing, so without the first one it would go on."""
    for rank in (1, 2):
        followers.break_off(rank)
    followers.listen(1, "second", lead=2, term=2)
    until(lambda: followers.hub.deposed or 1 not in followers.hub.members, "the lead to ask there", 20)
    assert followers.hub.deposed


def test_a_lead_that_all_nodes_have_come_back_to_goes_on(followers: Followers) -> None:
    """All connections have broken at once, and nobody has chosen another lead: nobody remembers the copies before."""
    for rank in (1, 2):
        followers.break_off(rank)
    for rank in (1, 2):
        followers.come(rank, "first", at=rank + 2)
    assert followers.decides(1)


def test_a_node_that_is_lost_with_its_spare_ranks_can_not_have_a_worker_of_them(hub: NodeHub) -> None:
    """The launcher goes on without one that can't be started."""
    pool = SpreadPool([], hub, {Worker(1, 2): 0})
    with pytest.raises(OSError, match="node 1"):
        pool.start(Worker(1, 2), lambda incarnation: spec_of(NamedWorkload("a:b")), 0.0, Spares(1, ()))


def test_spare_ranks_in_whose_place_a_worker_begins_again_are_spare_no_more(hub: NodeHub) -> None:
    """Fewer than a worker needs. With those of its next death they would make one at once, before a restart is due."""
    frames = fake_node((hub.host, hub.port))
    hub.wait_for_all(5)
    pool, spec = SpreadPool([], hub, {Worker(1, 2): 1}), spec_of(NamedWorkload("a:b"))
    ranks = spec.ranks
    assert ranks > 1
    pool.spares.add(1, [SpareRank(("dead", rank), -1) for rank in range(1, ranks)])
    entry = pool.start(Worker(1, 2), lambda _: spec, 0.0, node=1)
    assert entry.made_of == tuple(("dead", rank) for rank in range(1, ranks)) and not pool.spares.all()
    started = frames.receive()
    assert started["kind"] == "start" and [tuple(rank) for rank in started["fill"]] == list(entry.made_of)


def test_a_node_fills_the_places_that_the_lead_names() -> None:
    """It may know of others that came since, or in another order: those the lead books later, as they are here."""
    pool, spec = GivenProcesses(), encode_spec(spec_of(NamedWorkload("a:b")))
    came = [SpareRank((incarnation, 0), slot) for slot, incarnation in enumerate("abcd")]
    pool.spares.add(0, came)
    with node_with(pool) as lead:
        assert lead.frames is not None
        lead.frames.send({"kind": "start", "spec": spec, "fill": [["c", 0], ["a", 0], ["unknown", 0]]})
        exited = lead.frames.receive()
    assert pool.asked == [Spares(0, (came[0], came[2]))]
    assert (exited["kind"], exited["unstarted"]) == ("exited", True)
    assert {*pool.spares.on(0)} == {*came}, "it can't be started, so they are still spare"


def test_what_a_node_could_not_start_a_worker_of_is_still_spare_for_the_lead(hub: NodeHub) -> None:
    """And is tried again, though not at once."""
    frames = fake_node((hub.host, hub.port))
    hub.wait_for_all(5)
    pool, spec = SpreadPool([], hub, {}), spec_of(NamedWorkload("a:b"))
    came = [SpareRank(("dead", rank), -1) for rank in range(spec.ranks)]
    pool.spares.add(1, came)
    spares = pool.take_spares(spec.ranks)
    entry = pool.start(
        Worker(1, 2), lambda incarnation: dataclasses.replace(spec, incarnation=incarnation), 0.0, spares
    )
    assert frames.receive()["kind"] == "start" and not pool.spares.all()
    about = {"incarnation": entry.incarnation, "code": 1, "spare": [], "unstarted": True}
    frames.send({"kind": "exited", **about})
    entry.process.join(5)
    pool.forget(entry)
    pool.spare(entry)
    assert pool.spares.on(1) == tuple(came)
    assert pool.take_spares(spec.ranks) is None and pool.promises_spares(spec.ranks)
    frames.close()


def test_spare_ranks_of_a_node_that_is_back_are_gone(hub: NodeHub) -> None:
    """Nobody has asked for them meanwhile: so it is not seen by that that it was away."""
    frames = fake_node((hub.host, hub.port))
    hub.wait_for_all(5)
    pool, before = SpreadPool([], hub, {}), hub.links[1]
    pool.spares.add(1, [SpareRank(("dead", rank), -1) for rank in range(2)])
    frames.close()
    until(lambda: before not in hub.links.values(), "the lead to forget the node", 5)
    again = fake_node((hub.host, hub.port))
    hub.wait_for_all(5)
    assert pool.take_spares(2) is None
    again.close()


def test_a_new_lead_learns_from_each_node_which_ranks_are_spare_there() -> None:
    """Of what the lead before has begun there it may know nothing."""
    hub = NodeHub("127.0.0.1", 0, 2, "", lambda _: None, LeadStatus(0, lead=0, term=2, run="a run"))
    try:
        hub.take_over({1: ("127.0.0.1", 1)}, frozenset({1}))
        frames = fake_node((hub.host, hub.port), resumes=[1, 0])
        link = hub.followers(5)[1]
        pool = SpreadPool([], hub, {Worker(1, 2): 1})
        known = pool.adopt_there(link, Worker(0, 0), "known", 0.0)
        frames.send({"kind": "resumed", "spares": [["known", 1], ["before", 0], ["before", 1], ["other", 0]]})
        until(lambda: link.resumed, "its word", 10)
        spares = pool.take_spares(2)
        assert spares == Spares(1, tuple(SpareRank(("before", rank), -1) for rank in range(2)))
        assert [spare.rank for spare in pool.spares.on(1)] == [("other", 0)], "that of the other is told with its end"
        frames.send({"kind": "exited", "incarnation": "known", "code": -9, "spare": [1]})
        known.process.join(5)
        pool.forget(known)
        pool.spare(known)
        assert [spare.rank for spare in pool.spares.on(1)] == [("other", 0), ("known", 1)]
        frames.close()
    finally:
        hub.close("")


def test_what_a_node_tells_as_a_worker_begins_does_not_make_its_ranks_spare_again(hub: NodeHub) -> None:
    """A silent worker of before has ended, so the node tells all that is spare: those that were just taken, too."""
    frames = fake_node((hub.host, hub.port))
    hub.wait_for_all(5)
    pool, spec, link = SpreadPool([], hub, {}), spec_of(NamedWorkload("a:b")), hub.links[1]
    came = [SpareRank(("dead", rank), -1) for rank in range(spec.ranks)]
    pool.spares.add(1, came)
    spares = pool.take_spares(spec.ranks)
    frames.send({"kind": "resumed", "spares": [spare.rank for spare in came] + [("silent", 0)]})
    until(lambda: link.resumed, "its word", 10)
    entry = pool.start(Worker(1, 2), lambda _: spec, 0.0, spares)
    assert entry.made_of == tuple(spare.rank for spare in came)
    assert pool.take_spares(1) == Spares(1, (SpareRank(("silent", 0), -1),)) and not pool.spares.all()
    frames.close()


def test_what_a_worker_was_to_be_made_of_is_spare_where_the_lead_before_did_not_begin_it() -> None:
    """Its copy says that it has."""
    hub = NodeHub("127.0.0.1", 0, 2, "", lambda _: None, LeadStatus(0, lead=0, term=2, run="a run"))
    try:
        hub.take_over({1: ("127.0.0.1", 1)}, frozenset({1}))
        frames = fake_node((hub.host, hub.port), resumes=[1, 0])
        link = hub.followers(5)[1]
        pool = SpreadPool([], hub, {})
        entry = pool.adopt_there(link, Worker(0, 0), "not begun", 0.0)
        entry.made_of = came = (("dead", 0), ("dead", 1))
        about = json.loads(json.dumps(entry.told()))
        entry.made_of = ()
        entry.restore(about)
        assert entry.made_of == came, "a place whose links broke is open to it as before"
        frames.send({"kind": "exited", "incarnation": "not begun", "code": None, "spare": []})
        frames.send({"kind": "resumed", "spares": came})
        until(lambda: link.resumed, "its word", 10)
        pool.forget(entry)
        pool.spare(entry)
        assert pool.take_spares(2) == Spares(1, tuple(SpareRank(rank, -1) for rank in came))
        frames.close()
    finally:
        hub.close("")


@pytest.mark.parametrize(
    ("heard", "fenced"),
    [(False, False), (True, False), (False, True)],
    ids=["begun just before", "fenced", "fenced, two leads ago"],
)
def test_spare_ranks_of_a_worker_that_a_new_lead_has_itself_and_does_not_know_are_spare_again(
    heard: bool, fenced: bool
) -> None:
    """The lead before was lost as it began it: one rank does not end, and nothing may run there."""
    run = spec_of(NamedWorkload("a:b")).run
    hub = NodeHub("127.0.0.1", 0, 2, "", lambda _: None, LeadStatus(1, lead=1, term=2, run="a run"))
    ours, theirs = multiprocessing.Pipe()
    processes = [RemoteProcess(lambda: None) for _ in range(3)]
    came = tuple((("dead", rank), 4 + rank) for rank in range(3))
    entry = WorkerProcess(Worker(0, 0), "begun", processes[0], ours, 0.0, siblings=tuple(processes[1:]))
    entry.made_of, entry.slots = zip(*came, strict=True)
    entry.fenced, known = fenced, heard or fenced
    try:
        hub.take_over({}, frozenset())
        copy = Copy("a run", 1, 1, 0, 0, {}, {"begun": 0} if heard else {}, 0, pack({"workers": []}), plan_of(run), {})
        pool, _ = Succession(run, 2, hub, copy, Spool(), {"begun": entry}, {}, 0, SpareRanks()).take_over()
        assert entry.fenced and not pool.spares.all() and pool.promises_spares(2) != known, "as soon as it has ended"
        for process in processes[:2]:
            process.ended(-9)
        until(lambda: entry.has_ended([processes[0].sentinel]), "its end", 10)
        pool.forget(entry)
        pool.spare(entry)
        assert pool.spares.on(1) == (() if known else tuple(SpareRank(*one) for one in came[:2]))
        assert not pool.entries
    finally:
        hub.close("")
        theirs.close()


def test_of_a_worker_that_the_lead_has_fenced_its_node_books_no_spare_ranks(hub: NodeHub) -> None:
    """As the lead does not: nobody knows which of them was at fault."""
    frames = fake_node((hub.host, hub.port))
    hub.wait_for_all(5)
    pool = SpreadPool([], hub, {Worker(1, 2): 1})
    spec = spec_of(NamedWorkload("a:b"))
    entry = pool.start(Worker(1, 2), lambda incarnation: dataclasses.replace(spec, incarnation=incarnation), 0.0)
    pool.fence(entry, "its fault")
    start, kill = (frames.receive() for _ in range(2))
    assert (start["kind"], kill["kind"]) == ("start", "kill")
    assert spare_there(start, kill) == []
    assert spare_there(start) == [0]


def spare_there(*orders: dict[str, Any]) -> list[int]:
    """Which ranks of a worker a node says are spare, once it has heard that, and one of two has been killed."""
    ours, theirs = multiprocessing.Pipe()
    processes = [RemoteProcess(lambda: None) for _ in range(2)]
    there = WorkerProcess(Worker(0, 0), "i", processes[0], ours, 0.0, slots=(0, 1), siblings=(processes[1],))
    with node_with(GivenProcesses([there])) as lead, theirs:
        assert lead.frames is not None
        for order in orders:
            lead.frames.send(order)
        # In order: so what came before is heard.
        lead.frames.send({"kind": "clock"})
        while lead.frames.receive()["kind"] != "clock":
            pass
        for process, code in zip(processes, (channel.FENCED, -9), strict=True):
            process.ended(code)
        while (said := lead.frames.receive())["kind"] != "exited":
            pass
    return list(said["spare"])


def test_one_node_that_is_late_takes_no_time_from_what_the_others_have_to_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "FOLLOW_SECONDS", 0.5)
    spec = spec_of(NamedWorkload("a:b")).run
    hub = NodeHub("127.0.0.1", 0, 3, "", lambda _: None, LeadStatus(2, lead=2, term=2, run="a run"))
    try:
        nodes = {1: ("127.0.0.1", 1), 0: ("127.0.0.1", 2)}
        hub.take_over(nodes, frozenset(nodes))
        frames = fake_node((hub.host, hub.port), resumes=[1, 0])
        copy = Copy("a run", 1, 1, 0, 0, nodes, {}, 0, pack({"workers": []}), plan_of(spec), {})
        succession = Succession(spec, 3, hub, copy, Spool(), {}, {}, 0, SpareRanks())
        _, takeover = succession.take_over()
        assert frames.receive()["kind"] == "resume" and takeover.others_tell(), "node 1 is there, and is waited for"
        frames.send({"kind": "resumed", "spares": []})
        until(lambda: not takeover.others_tell(), "its word", 10)
    finally:
        hub.close("")


def plan_of(run: RunSpec) -> str:
    return to_text(Catalog(run.options.job, Technique.STAGGERED, MemoryLimit("uniform")).plan_for(set())[0])


class Slow(socket.socket):
    """Once this is `held`, the thread `reads` that asks for its number has it, to look whether it is open, and the
    second time does nothing with it until it is `free`; and so has the thread `sends` that shuts it down."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(fileno=connection.detach())
        self.held, self.asked, self.free = threading.Event(), threading.Event(), threading.Event()
        self._times = 0
        self.shut_down = 0
        """Its number by then."""

    def fileno(self) -> int:
        number = super().fileno()
        if self.held.is_set() and threading.current_thread().name == "reads":
            self._times += 1
            if self._times == 2:
                self.asked.set()
                self.free.wait(20)
        return number

    def shutdown(self, how: int) -> None:
        if self.held.is_set() and threading.current_thread().name == "sends":
            self.asked.set()
            self.free.wait(20)
            self.shut_down = self.fileno()
        super().shutdown(how)


def test_who_was_about_to_wait_as_the_connection_was_closed_leaves(wire: Wire) -> None:
    """Another socket may have the number by then. A lead that waited there took a node that had come back for one that
    it had already, until it gave up."""
    slow = Slow(wire[0])
    lead, _ = both((slow, wire[1]), "", "")
    assert isinstance(lead, Frames)
    left = threading.Event()
    slow.held.set()
    channel.follow(lead.receive, lambda _: None, left.set, name="reads")
    assert slow.asked.wait(10)
    closing = threading.Thread(target=lead.close)
    closing.start()
    closing.join(0.2)  # it may wait for the other; if it does not, the number is free
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        slow.free.set()
        assert left.wait(5)
        closing.join(5)
        assert not closing.is_alive() and slow.fileno() < 0


def test_what_is_shut_down_is_not_closed_meanwhile(wire: Wire) -> None:
    """Another connection that had the number by then would be ended."""
    slow = Slow(wire[0])
    lead, _ = both((slow, wire[1]), "", "")
    lead.open_outbox("sends")
    slow.held.set()
    lead.post_all({"number": int(text)} for text in ("0", "none"))  # what can't be read ends it
    assert slow.asked.wait(10)
    closing = threading.Thread(target=lead.close)
    closing.start()
    closing.join(0.2)  # it may wait for the other; if it does not, the number is free
    slow.free.set()
    closing.join(5)
    assert not closing.is_alive() and slow.shut_down > 0 > slow.fileno()


def test_what_comes_after_the_end_of_a_connection_is_not_kept(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender has the token: 940 MB were kept in eight seconds."""
    made: list[tuple[ssl.SSLObject, ssl.MemoryBIO]] = []
    wrap = ssl.SSLContext.wrap_bio

    def kept(context: ssl.SSLContext, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, **how: Any) -> ssl.SSLObject:
        made.append((wrap(context, incoming, outgoing, **how), outgoing))
        return made[-1][0]

    monkeypatch.setattr(ssl.SSLContext, "wrap_bio", kept)
    lead, node = both(wire, "secret", "secret")
    node.send({"kind": "last"})
    (tls, outgoing), *_ = (one for one in made if not one[0].server_side)
    with contextlib.suppress(ssl.SSLError):
        tls.unwrap()
    wire[1].sendall(outgoing.read() + b"\x17\x03\x03" * 1000)
    assert lead.receive() == {"kind": "last"}
    with pytest.raises((ConnectionResetError, NotTrusted)):
        lead.receive(time.monotonic() + 10)
