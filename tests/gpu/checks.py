"""The checks, each in a process of its own: `python -m tests.gpu.checks NAME ANSWER TOLD`, as tests.gpu starts it."""

from __future__ import annotations

import faulthandler
import json
import math
import platform
import shutil
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed

BEGAN = time.monotonic()
NEEDED = ("numpy", "pydantic", "requests", "safetensors")


class CheckFailed(Exception):
    """The sentence is the table's note."""


class Skipped(Exception):
    """The same."""


@dataclass(frozen=True)
class Told:
    """What a check is told. limit: seconds that it has. folder: for what one check leaves to the next."""

    device: str
    transport: str
    limit: float
    folder: str

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def carrier(self) -> str:
        """As the product calls it."""
        return "ordered" if self.transport == "nccl" else "tagged"


Said = tuple[str, str]
"""Figure and note."""


# -- the machine ------------------------------------------------------------------------------------


def environment(told: Told) -> Said:
    missing = [name for name in NEEDED if not _importable(name)]
    cuda: Any = torch.cuda
    cudnn: Any = torch.backends.cudnn
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if missing:
        raise CheckFailed(f"{versions}; not installed: {', '.join(missing)}")
    if told.on_gpu:
        if not cuda.is_available():
            raise CheckFailed(f"{versions}: no GPU that torch can use")
        what = cuda.get_device_properties(0)
        nccl = ".".join(map(str, _nccl_version())) or "none"
        versions += f", CUDA {torch.version.cuda}, NCCL {nccl}, cuDNN {cudnn.version()}"
        versions += f", {cuda.device_count()} × {what.name}, {what.total_memory / 2**30:.0f} GiB"
        if float(torch.ones(64, 64, device="cuda").matmul(torch.ones(64, 64, device="cuda")).sum()) != 64.0**3:
            raise CheckFailed(f"{versions}: a product of matrices is wrong")
    return versions, ""


def _nccl_version() -> tuple[int, ...]:
    from openrecycle.agent.config.devices import nccl_version

    return nccl_version()


def fork(told: Told) -> Said:
    """Workers are forked from a process that has torch loaded: it must have left CUDA alone."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.agent.untouched_cuda"], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout)
    if found["initialized"] or found["bad_fork"] or (told.on_gpu and found.get("sum") != 3.0):
        raise CheckFailed(f"a forked worker can't use the GPU: {found}")
    return "", f"asked while it imported: {', '.join(found['asked']) or 'nothing'}"


def _importable(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


# -- groups -----------------------------------------------------------------------------------------


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def nccl_2(told: Told) -> Said:
    _check_sharing(told, 2)
    return _pair(told, "ordered")


def host(told: Told) -> Said:
    return _pair(told, "tagged")


def _check_sharing(told: Told, workers: int) -> None:
    from openrecycle.agent.config.devices import Platform
    from openrecycle.planner.jobs.errors import InputError

    try:
        Platform(device=told.device, transport="ordered").check(workers)  # type: ignore[arg-type]
    except InputError as error:
        raise Skipped(str(error)) from None


def _pair(told: Told, transport: Any) -> Said:
    from openrecycle.planner.jobs.job import Worker
    from tests.gpu import ranks

    found = ranks.run(ranks.pair, (Worker(0, 0), Worker(1, 0)), told.device, transport)
    worst = {name: max(one[name] for one in found) for name in found[0]}
    size = ranks.ELEMENTS * 4 / 2**20
    return (
        f"{size:.0f} MiB each way {_ms(worst['send'])}, sum of {2 * size:.0f} MiB {_ms(worst['sum'])}",
        f"connected in {_ms(worst['connect'])}",
    )


def _members() -> tuple[Any, ...]:
    from openrecycle.planner.jobs.job import Worker

    return tuple(Worker(pipeline, stage) for pipeline in range(2) for stage in range(2))


def nccl_4(told: Told) -> Said:
    _check_sharing(told, 4)
    from tests.gpu import ranks

    found = ranks.run(ranks.grid, _members(), told.device, "ordered")
    return f"2 × 2 workers connected in {_ms(max(one['connect'] for one in found))}", ""


def nccl_death(told: Told) -> Said:
    _check_sharing(told, 4)
    from tests.gpu import ranks

    found = [one for one in ranks.run(ranks.death, _members(), told.device, "ordered") if one]
    worst = {name: max(one[name] for one in found) for name in found[0]}
    return (
        f"awake {_ms(worst['woken'])} after the news, device free after {_ms(worst['halted'])}",
        f"new groups of the survivors in {_ms(worst['again'])}",
    )


def waits(told: Told) -> Said:
    """What waits for all that a GPU was given, which no worker may do in an op: see agent.transport.group."""
    _check_sharing(told, 2)
    from openrecycle.planner.jobs.job import Worker
    from tests.gpu import ranks

    found, _ = ranks.run(ranks.waits, (Worker(0, 0), Worker(1, 0)), told.device, "ordered")
    wait, go_on, failed = ([name for name, said in found.items() if said == asked] for asked in (1.0, 0.0, -1.0))
    note = f"do not: {', '.join(go_on)}" + (f"; can't be tried: {', '.join(failed)}" if failed else "")
    return f"wait for a receive: {', '.join(wait) or 'none'}", note


# -- jobs -------------------------------------------------------------------------------------------

ITERATIONS = 4
KILLS = ("W0_1@1:I0", "W1_0@2:F1", "W1_1@1:O")
"""Of `train`: in the backward, in the forward, right before a step."""
KILLED_STAGE = ("W0_1@5:F0", "W1_1@5:I1")
MORE_KILLS = ("W0_0@0:F0", "W1_1@2:R", "W0_1@3:W1", "W1_0@1:I1", "W0_0@2:O", "W1_1@3:F0")
"""Of `kills`, as far as there is time."""


def _job(told: Told, **options: Any) -> Any:
    """A job of 2 × 2 workers on the device, in this process."""
    from openrecycle.agent.config.devices import Platform
    from openrecycle.agent.config.options import Timeouts
    from openrecycle.agent.models.workload import NamedWorkload
    from tests.agent.local_jobs import LocalJob

    heard = options.pop("on_line", lambda job, line: None)
    path, model = options.pop("workload", "openrecycle.agent.examples.gpt:Gpt"), options.pop("model", {})
    workload = NamedWorkload(path, _small(told) | model)
    computes_on = options.pop("platform", Platform(device=told.device, transport=told.carrier))  # type: ignore[arg-type]

    def on_line(job: Any, line: Any) -> None:
        print(json.dumps(line), file=sys.stderr, flush=True)
        heard(job, line)

    job = LocalJob(
        on_line=on_line,
        **{"pipelines": 2, "stages": 2, "micro_batches": 2, "iterations": ITERATIONS} | options,
        workload=workload,
        platform=computes_on,
        timeouts=Timeouts(form=40.0, transfer=40.0, group=45.0, silence=30.0),
        hang_seconds=30.0,
    )
    return job.run()


def _small(told: Told) -> dict[str, Any]:
    """The model of jobs whose bits count."""
    if told.on_gpu:
        return {"width": 256, "heads": 4, "sequence": 128, "batch": 4}
    return {"width": 32, "heads": 2, "sequence": 16, "batch": 2}


def _result(job: Any) -> list[Any]:
    """Losses, and what the parameters were at the end."""
    final = job.lines[-1].get("final")
    if final is None or not all(math.isfinite(float.fromhex(loss)) for loss in job.losses):
        raise CheckFailed(f"no end, or losses that are no numbers: {', '.join(job.losses)}")
    return [*job.losses, final]


def _reference(told: Told) -> list[Any]:
    """Of the job to which nothing happens, on this device; computed once for all checks."""
    kept = Path(told.folder) / f"reference-{told.transport}.json"
    if not kept.exists():
        kept.write_text(json.dumps(_result(_job(told))))
    found: list[Any] = json.loads(kept.read_text())
    return found


def train(told: Told) -> Said:
    # Timed by the first one, to which nothing happens.
    moments: list[float] = []
    job = _job(told, iterations=20 if told.on_gpu else ITERATIONS, on_line=lambda _, line: _note(moments, line))
    steps = [b - a for a, b in pairwise(moments[1:])]  # the first one warms up
    reference = _reference(told)
    if job.losses[:ITERATIONS] != reference[:ITERATIONS]:
        raise CheckFailed("two runs without a failure differ")
    figure = f"iteration {_ms(statistics.median(steps))}, 2 × 2 workers over {told.transport}"
    note = _survive(told, KILLS if told.on_gpu else KILLS[:1], reference)
    if told.transport == "nccl":
        if _result(_job(replace(told, transport="gloo"))) != reference:
            raise CheckFailed(f"{note}; over gloo others")
        note += ", over gloo too"
    return figure, note


def _note(moments: list[float], line: Any) -> None:
    if "iteration" in line:
        moments.append(time.monotonic())


def kills(told: Told) -> Said:
    return "", _survive(told, MORE_KILLS if told.on_gpu else MORE_KILLS[:1], _reference(told))


def _survive(told: Told, wishes: tuple[str, ...], reference: list[Any]) -> str:
    """As many as there is time for; what is no success is raised."""
    longest, done = 0.0, 0
    for wish in wishes:
        started = time.monotonic()
        if done and started - BEGAN + 1.5 * longest > 0.8 * told.limit:
            break
        job = _job(told, kills=(wish,))
        if job.dead != [wish[:4]]:
            raise CheckFailed(f"--kill {wish}: dead are {', '.join(job.dead) or 'none'}")
        if _result(job) != reference:
            raise CheckFailed(f"--kill {wish}: other bits than without a failure")
        done, longest = done + 1, max(longest, time.monotonic() - started)
    return f"{done} of {len(wishes)} kills: the same bits"


def hand_over(told: Told) -> Said:
    from openrecycle.agent.config.options import HandOver

    def on_line(job: Any, line: Any) -> None:
        if "failure" in line and len(job.said("ready")) == 4:
            job.start("W1_1")
        if "iteration" in line and line["living"] == 4 and len(job.said("ready")) > 4:
            formed = (m for _, m in job.messages if m["kind"] == "formed" and m["generation"] == line["generation"])
            if line["iteration"] >= next(formed)["iteration"] + 2:
                job.stop()

    job = _job(
        told,
        iterations=5000,
        kills=("W1_1@1:I0",),
        pace=0.05 if told.on_gpu else 0.02,
        hand_over=HandOver(at_once=0),
        on_line=on_line,
    )
    if job.dead != ["W1_1"]:
        raise CheckFailed(f"dead are {', '.join(job.dead)}")
    taken = len(job.losses)
    if job.losses != _job(told, iterations=taken).losses:
        raise CheckFailed("other bits than without a failure")
    return f"back after {taken} iterations", "the same bits; a stage's state was taken from its peer"


def sharded(told: Told) -> Said:
    """The optimizer's state over three workers of a stage, gradients reduced in buckets."""
    from openrecycle.agent.config.options import Optimization

    kill = "W1_1@1:O"
    shards = Optimization(sharding="zero1", bucket_cap_mb=0.1 if told.on_gpu else 0.01)
    job = _job(told, pipelines=3, optimization=shards, kills=(kill,))
    if job.dead != [kill[:4]]:
        raise CheckFailed(f"--kill {kill}: dead are {', '.join(job.dead) or 'none'}")
    if _result(job) != _result(_job(told, pipelines=3)):
        raise CheckFailed(f"--kill {kill}: other bits than without shards, and without a failure")
    return "", f"--kill {kill}: the same bits as without shards"


def ranks(told: Told) -> Said:
    """Workers of two ranks, which share a GPU where there are few."""
    from openrecycle.agent.config.devices import Platform

    done = []
    for name in ("tensor_parallel", "fully_sharded"):
        computes_on = Platform(device=told.device, transport=told.carrier, ranks_per_worker=2)  # type: ignore[arg-type]
        _lose_a_rank(told, name, "W1_1.1@1:I0", platform=computes_on, divided=name == "fully_sharded")
        done.append(name.replace("_", " "))
    return "", f"a rank was killed: the same bits ({', '.join(done)})"


def mesh(told: Told) -> Said:
    """Workers whose ranks are a mesh of two dimensions: 2 workers of 4."""
    from openrecycle.agent.config.devices import Platform

    about: Any = {"device": told.device, "transport": told.carrier}
    computes_on = Platform(**about, ranks_per_worker=4, mesh="2x2")
    _lose_a_rank(told, "tensor_parallel", "W1_0.3@1:I0", platform=computes_on, divided=True, stages=1)
    return "", "a rank was killed: the same bits (tensor parallel over one dimension, fully sharded over the other)"


def layers(told: Told) -> Said:
    """Layers move to other stages when a worker is lost; one weight is the first layer's and the last one's."""
    from tests.agent.rearranging import rearranging

    partition, kill = (3, 1, 2), "W1_1@1:F1"
    options: dict[str, Any] = {"stages": 3, "iterations": 6, "model": {"layers": 6, "tied": True}}
    calm = _result(_job(told, **options))
    job = _job(told, kills=(kill,), decides=rearranging({2: partition}), **options)
    changes = [line["relayout"]["partition"] for line in job.lines if "relayout" in line]
    if job.dead != [kill[:4]] or changes != [list(partition)]:
        raise CheckFailed(f"--kill {kill}: dead are {', '.join(job.dead) or 'none'}, partitions {changes or 'none'}")
    if _result(job) != calm:
        raise CheckFailed(f"--kill {kill}: other bits than without a failure")
    return "", f"--kill {kill}, then layers {partition}: the same bits"


def lost_stage(told: Told) -> Said:
    """All workers of a stage are lost, and it goes back to a checkpoint."""
    from openrecycle.agent.checkpoints import whole_checkpoints
    from openrecycle.agent.config.options import Checkpoints

    folder = Path(told.folder) / f"checkpoints-{told.transport}"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, which a job would refuse

    def newest() -> str | None:
        return next((str(found.path) for found in whole_checkpoints(folder)), None)

    def on_line(job: Any, line: Any) -> None:
        if "failure" in line and len(job.dead) == 2:
            for name in job.dead:
                job.start(name)

    job = _job(
        told,
        iterations=8,
        checkpoints=Checkpoints(directory=str(folder), every=2),
        checkpoint=newest,
        kills=KILLED_STAGE,
        on_line=on_line,
    )
    if job.dead != ["W0_1", "W1_1"] or newest() is None:
        raise CheckFailed(f"dead are {', '.join(job.dead) or 'none'}")
    if _result(job) != _result(_job(told, iterations=8)):
        raise CheckFailed("other bits than without a failure")
    return "", f"{' and '.join(KILLED_STAGE)} killed, back to a checkpoint: the same bits"


def precision(told: Told) -> Said:
    """Autocast, gradients that are clipped, forwards that are done again in the backward, and evaluations."""
    from openrecycle.agent.config.options import Optimization

    def job(kind: Any, recomputes: bool, clip_norm: float | None, kills: tuple[str, ...] = ()) -> list[Any]:
        found = _job(
            told,
            workload="tests.gpu.jobs:Recomputed" if recomputes else "tests.agent.evaluated:Evaluated",
            optimization=Optimization(autocast=kind, clip_norm=clip_norm),
            evaluate_every=2,
            kills=kills,
        )
        if found.dead != [kill[:4] for kill in kills]:
            raise CheckFailed(f"{kind}: dead are {', '.join(found.dead) or 'none'}")
        return [*_result(found), *(line["evaluation"] for line in found.lines if "evaluation" in line)]

    calm = {kind: job(kind, True, 0.3) for kind in ("bf16", "fp16")}
    for kind, found in calm.items():
        if job(kind, True, 0.3, KILLS[:1]) != found:
            raise CheckFailed(f"{kind}: other bits than without a failure")
    if job("bf16", False, 0.3) != calm["bf16"]:
        raise CheckFailed("bf16: other bits where forwards are not recomputed")
    # That what was asked for has been done.
    others = [job("bf16", False, None), job(None, False, 0.3)]
    if calm["bf16"] == calm["fp16"] or any(other in calm.values() for other in others):
        raise CheckFailed("autocast or clipping do not show in the bits")
    if len(calm["bf16"]) != ITERATIONS + 1 + ITERATIONS // 2:
        raise CheckFailed("no evaluations")
    return "", f"--kill {KILLS[0]}: the same bits (bf16, fp16; clipped, recomputed, evaluated)"


def compiled(told: Told) -> Said:
    begun = time.monotonic()
    options: dict[str, Any] = {"workload": "tests.gpu.jobs:Compiled"}
    calm = _result(_job(told, **options))
    took = time.monotonic() - begun
    for kill in KILLS[:2]:
        job = _job(told, kills=(kill,), **options)
        if job.dead != [kill[:4]]:
            raise CheckFailed(f"--kill {kill}: dead are {', '.join(job.dead) or 'none'}")
        if _result(job) != calm:
            raise CheckFailed(f"--kill {kill}: other bits than without a failure")
    if calm == _reference(told):
        raise CheckFailed("the bits of layers that are not compiled")
    return f"a job of {ITERATIONS} iterations {took:.0f} s", "2 of 2 kills: the same bits"


def _lose_a_rank(told: Told, name: str, kill: str, **options: Any) -> None:
    """name: of the example."""
    if told.transport == "nccl":
        _check_sharing(told, 8)
    options["workload"] = f"openrecycle.agent.examples.{name}:Gpt"
    reference = _result(_job(told, **options))
    job, worker = _job(told, kills=(kill,), **options), kill.partition(".")[0]
    if job.dead != [worker]:
        raise CheckFailed(f"{name}: dead are {', '.join(job.dead) or 'none'}")
    if _result(job) != reference:
        raise CheckFailed(f"{name}: other bits than without a failure")


def command(told: Told) -> Said:
    """`openrecycle train`, as a user runs it."""
    if missing := [name for name in ("typer", "rich", "cryptography") if not _importable(name)]:
        raise Skipped(f"not installed: {', '.join(missing)}")
    reference, folder = _reference(told), Path(told.folder)
    checkpoints = folder / "command-checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    losses: list[str] = []
    final: Any = None
    for iterations, more in ((2, ["--kill", KILLS[0]]), (ITERATIONS, ["--resume", "newest", "--kill", "W1_0@3:F1"])):
        record = folder / f"command-{iterations}.jsonl"
        record.unlink(missing_ok=True)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "agent", "train", "--device", told.device, "--transport", told.carrier),
                *("--pipelines", "2", "--stages", "2", "--micro-batches", "2", "--iterations", str(iterations)),
                *("--workload-options", json.dumps(_small(told)), "--record", str(record)),
                *("--checkpoint", str(checkpoints), "--checkpoint-every", "2", *more),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout, done.stderr, file=sys.stderr)
        if done.returncode:
            raise CheckFailed(f"exit status {done.returncode}: {done.stderr.strip()[-200:]}")
        lines = list(map(json.loads, record.read_text().splitlines()))
        losses += [line["loss"] for line in lines if "iteration" in line]
        died = [line["failure"]["worker"] for line in lines if "failure" in line]
        if died != [more[-1][:4]]:
            raise CheckFailed(f"{' '.join(more)}: dead are {', '.join(died) or 'none'}")
        final = lines[-1]["final"]
    if [*losses, final] != reference:
        raise CheckFailed("other bits than without a failure")
    return "", f"--kill {KILLS[0]}, then --resume and another kill: the same bits"


# -- measuring --------------------------------------------------------------------------------------


def _bench(told: Told, mode: str, sizes: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A benchmark of a stage that is the whole model, its job and the device, which this process takes as a worker
    does."""
    from openrecycle.agent.config.devices import Platform
    from openrecycle.agent.config.options import Optimization
    from openrecycle.agent.models.workload import NamedWorkload
    from openrecycle.agent.profiling import ProfilingEffort, StageBenchmark, StageRun
    from openrecycle.planner.jobs.job import Job, Worker

    torch.set_num_threads(1)
    platform_ = Platform(device=told.device, transport="tagged")  # type: ignore[arg-type]
    device = platform_.take(0, deterministic=mode == "deterministic")
    job = Job.uniform(1, 1, 8 if told.on_gpu else 2)
    optimization = Optimization(mode=mode, autocast="bf16" if told.on_gpu else None)  # type: ignore[arg-type]
    source = NamedWorkload("openrecycle.agent.examples.gpt:Gpt", _sizes(told) | sizes)
    run = StageRun(Worker(0, 0), job, source, optimization, ProfilingEffort(), 1)
    return StageBenchmark(run, device=device), job, device


LARGER = {"width": 2048, "sequence": 1024, "batch": 8}
"""Of which the GPU has more to do than the host."""


def _sizes(told: Told) -> dict[str, Any]:
    if told.on_gpu:
        return {"width": 1024, "heads": 16, "sequence": 512, "batch": 4, "layers": 4, "dropout": 0.0}
    return {"width": 32, "heads": 2, "sequence": 16, "batch": 2, "layers": 2, "dropout": 0.0}


def sums(told: Told) -> Said:
    """A term is added to a sum of gradients in one kernel, to the bits that torch's own operations give."""
    from openrecycle.agent.stages.kernels import add_in_torch, fused_add

    device = torch.device(told.device, 0) if told.on_gpu else torch.device("cpu")
    begun = time.monotonic()
    fused = fused_add(device)
    took = time.monotonic() - begun
    total, term = (torch.zeros(1 << 22, dtype=dtype, device=device) for dtype in (torch.int64, torch.float32))
    rejected, scratch = torch.zeros(1, dtype=torch.int64, device=device), (torch.empty_like(term), total.clone())
    eager = _median_seconds(lambda: add_in_torch(total, term, rejected, 2.0**50, 2.0**60, *scratch), device)
    figure = f"4 M elements: {_ms(eager)} in torch"
    if fused is None:
        if told.on_gpu:
            raise CheckFailed("there is no kernel; the log says why")
        return figure, ""
    own = _median_seconds(lambda: fused(total, term, rejected, 2.0**50, 2.0**60), device)
    return f"{figure}, {_ms(own)} in one kernel", f"the same bits; made and compared in {took:.1f} s"


def profile(told: Told) -> Said:
    """As `openrecycle profile --device cuda` measures, layer by layer; in bfloat16."""
    from openrecycle.agent.config.devices import Platform
    from openrecycle.agent.config.options import Optimization
    from openrecycle.agent.profiling import ProfilingEffort, measure_workload

    torch.set_num_threads(1)  # as workers have
    grid = (2, 2, 8 if told.on_gpu else 2)
    effort = ProfilingEffort(repeats=8 if told.on_gpu else 2)
    optimization = Optimization(autocast="bf16" if told.on_gpu else None)
    computes_on = Platform(device=told.device, transport=told.carrier)  # type: ignore[arg-type]

    def say(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    workload = "openrecycle.agent.examples.gpt:Gpt"
    found = measure_workload(workload, _sizes(told), grid, optimization, effort, say, computes_on)
    (Path(told.folder) / "profile.json").write_text(found.profile(*grid).model_dump_json(indent=1))
    ops = {"F": "forward", "I": "input_backward", "W": "weight_backward", "O": "step"}
    sums = {kind: sum(getattr(part, name).median for part in found.parts) for kind, name in ops.items()}
    assert found.reductions is not None
    times = ", ".join(f"{kind} {ms:.3g} ms" for kind, ms in sums.items())
    spread = max(part.spread for part in found.parts)
    mib = sum(part.activation_bytes for part in found.parts) / 2**20
    note = (
        f"sums over {len(found.parts)} layers; times of one vary by up to {spread:.0%}; {mib:.0f} MiB of activations; "
    )
    note += f"transfer {found.transfers[0].median:.3g} ms, reduction of "
    note += f"{found.reductions.bytes / 2**20:.0f} MiB {found.reductions.by_peers[0].median:.3g} ms"
    return times, f"{note} over {told.transport}"


def speed(told: Told) -> Said:
    """The whole model in one worker, against a plain loop over the same micro-batches; and a larger one."""
    figures, notes = [], []
    for name, sizes in (("", {}), ("larger: ", LARGER)) if told.on_gpu else (("", {}),):
        figure, note = _speed_of(told, sizes)
        figures.append(name + figure)
        notes.append(name + note)
    return "; ".join(figures), "; ".join(notes)


def _speed_of(told: Told, sizes: dict[str, Any]) -> Said:
    seconds: dict[str, float] = {}
    note = ""
    for mode in ("fast", "deterministic"):
        bench, job, device = _bench(told, mode, sizes)
        seconds[mode] = _median_seconds(bench.round, device)
        if device.type == "cuda":
            count, places = host_waits(bench.round)
            per_op = count / (3 * job.micro_batches + 1)
            note += f"{mode}: {count} host waits an iteration, {per_op:.1f} an op ({places}); "
        del bench
    torch.use_deterministic_algorithms(False)
    seconds["plain"] = _median_seconds(_plain_loop(told, job, device, sizes), device)
    figure = f"iteration {_ms(seconds['plain'])} in a plain loop"
    for mode in ("fast", "deterministic"):
        figure += f", {mode} {_ms(seconds[mode])} ({seconds[mode] / seconds['plain']:.2f} ×)"
    return figure, note.rstrip("; ") or "one worker"


def _median_seconds(round_: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(12 if device.type == "cuda" else 4):
        _synchronize(device)
        begun = time.monotonic()
        round_()
        _synchronize(device)
        times.append(time.monotonic() - begun)
    return statistics.median(times[2:])


def _plain_loop(told: Told, job: Any, device: torch.device, sizes: dict[str, Any]) -> Callable[[], None]:
    from openrecycle.agent.examples.gpt import Gpt
    from openrecycle.agent.models.layers import build_layer

    workload = Gpt(**_sizes(told) | sizes)
    layers = workload.layer_count(1)
    module = torch.nn.Sequential(*(build_layer(workload, layer, layers, 0) for layer in range(layers))).to(device)
    optimizer = workload.optimizer(module.parameters())
    iteration = iter(range(10**6))

    def round_() -> None:
        number = next(iteration)
        for m in range(job.micro_batches):
            x, y = (read(0, number, 0, m).to(device) for read in (workload.inputs, workload.targets))
            with torch.autocast(device.type, torch.bfloat16, enabled=told.on_gpu):
                loss = workload.loss(module(x), y) / job.micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return round_


def host_waits(round_: Callable[[], Any]) -> tuple[int, str]:
    """How often the host waits for the GPU in it, and the places where it does so most often."""
    cuda: Any = torch.cuda
    seen: Counter[str] = Counter()
    waits = cuda.Event.synchronize

    def counted(event: Any) -> None:
        seen["event"] += 1
        waits(event)

    cuda.Event.synchronize = counted
    cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            round_()
    finally:
        cuda.set_sync_debug_mode("default")
        cuda.Event.synchronize = waits
    seen.update(f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
    return sum(seen.values()), ", ".join(f"{place} {count}" for place, count in seen.most_common(4))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


CHECKS: dict[str, Callable[[Told], Said]] = {
    "environment": environment,
    "fork": fork,
    "nccl-2": nccl_2,
    "nccl-4": nccl_4,
    "nccl-death": nccl_death,
    "waits": waits,
    "host": host,
    "train": train,
    "kills": kills,
    "hand-over": hand_over,
    "sharded": sharded,
    "ranks": ranks,
    "mesh": mesh,
    "layers": layers,
    "lost-stage": lost_stage,
    "precision": precision,
    "compiled": compiled,
    "command": command,
    "sums": sums,
    "profile": profile,
    "speed": speed,
}


def main() -> None:
    name, answer, told = sys.argv[1], Path(sys.argv[2]), Told(**json.loads(sys.argv[3]))
    # Where it stands, shortly before it is ended.
    faulthandler.dump_traceback_later(max(1.0, told.limit - 2.0))
    try:
        figure, note = CHECKS[name](told)
        said = {"status": "ok", "figure": figure, "note": note}
    except Skipped as reason:
        said = {"status": "skipped", "figure": "", "note": str(reason)}
    except Exception as error:
        traceback.print_exc()
        text = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
        said = {"status": "failed", "figure": "", "note": text}
    answer.write_text(json.dumps(said))
    sys.stderr.flush()


if __name__ == "__main__":
    main()
