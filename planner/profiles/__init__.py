"""Profiles by name or from a file: measured ones, and analytic ones of the models in the papers.

A file that the agent's profiler writes has *parts*: the stages of one cut model, all its layers, or the pieces of a
model whose layers are alike (embedding, one layer, head). From layers the stages of any grid are put together. Each
time comes with its spread, and the document says on which hardware it was measured. The profiles in this folder go by
name (`shipped`). Where a profile is asked for, the document of a job is accepted too (`load`).

An analytic profile (`ModelShape`) is a first guess from FLOPs and bandwidth; a measured one is better. FLOPs and bytes
per layer are those of Narayanan et al. (Efficient Large-Scale Language Model Training on GPU Clusters, 2021) and
Korthikanti et al. (Reducing Activation Recomputation, 2022), without recomputation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import MAX_BYTES, MAX_LAYERS, Job, LayerProfile, StageProfile, Worker, balanced
from openrecycle.planner.plans.plan import (
    INTEGER,
    PRINTABLE,
    DocumentModel,
    JobDoc,
    PlanError,
    StageDoc,
    first_problem,
    job_doc,
    read_json,
    read_model,
    read_whole,
)

# -- analytic profiles of the papers' model shapes ----------------------------------------------


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. sequence: tokens of one sample."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51_200

    @property
    def layer_parameters(self) -> int:
        return 12 * self.hidden * self.hidden + 13 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + (self.vocabulary + self.sequence) * self.hidden

    @property
    def layer_flops(self) -> float:
        """FLOPs of one layer's forward of a sample; the gradients of input and weights take as many each."""
        return self.sequence * (24 * self.hidden**2 + 4 * self.sequence * self.hidden)

    @property
    def head_flops(self) -> float:
        """FLOPs of the forward of the projection to the vocabulary."""
        return 2.0 * self.sequence * self.hidden * self.vocabulary

    @property
    def layer_activation_bytes(self) -> float:
        """Bytes that one layer keeps of a sample between forward and backward, in 16 bits."""
        return self.sequence * self.hidden * (34 + 5 * self.heads * self.sequence / self.hidden)


# The 3.35B shape is not published with ReCycle: this one has that many parameters.
SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("gpt-2", 48, 1600, 25, sequence=1024),
        ModelShape("gpt-3-medium", 24, 1024, 16),
        ModelShape("gpt-3-2.7b", 32, 2560, 32),
        ModelShape("gpt-3-3.35b", 28, 3072, 24),
        ModelShape("gpt-3-6.7b", 32, 4096, 32),
        ModelShape("gpt-18.4b", 40, 6144, 48),
        ModelShape("gpt-39.1b", 48, 8192, 64),
        ModelShape("gpt-76.1b", 60, 10240, 80),
        ModelShape("gpt-145.6b", 80, 12288, 96),
    )
}


# A worker: A100 80 GB, 100 Gb/s. FLOPS: peak in 16 bits; EFFICIENCY: the fraction of it that ops reach; BANDWIDTH:
# bytes per second between workers; MEMORY: bytes.
FLOPS, EFFICIENCY, BANDWIDTH, MEMORY = 312e12, 0.45, 12.5e9, 80 * 10**9


def shape_name(text: str) -> str:
    """Return a model's name as it is spelled here; the published tables spell gpt-3-6.7b `gpt3-6.7b`."""
    return f"gpt-3-{text[5:]}" if text.startswith("gpt3-") else text


def model_shape(name: str) -> ModelShape:
    """Return a shape by name. Raises InputError."""
    name = shape_name(name)
    if name not in SHAPES:
        raise InputError("--model", name, "one of " + ", ".join(SHAPES))
    return SHAPES[name]


def analytic_job(shape: ModelShape, pipelines: int, stages: int, micro_batches: int) -> Job:
    """Make the job of a shape, in milliseconds; each micro-batch has one sample. Raises InputError.

    The first stage also holds the embedding, the last one the projection to the vocabulary, tied to it.
    """
    if not 1 <= stages <= shape.layers:
        raise InputError("stages", stages, f"a number from 1 to {shape.layers}, the layers of {shape.name}")
    share, more = divmod(shape.layers, stages)
    profiles = []
    for stage in range(stages):
        # Layers left over go to stages in the middle first, since the ends have the embedding.
        layers = share + (1 <= stage <= more if more < stages - 1 else stage < more)
        parameters = layers * shape.layer_parameters
        flops = layers * shape.layer_flops
        if stage in (0, stages - 1):
            parameters += shape.vocabulary * shape.hidden
        if stage == stages - 1:
            flops += shape.head_flops
        forward = _milliseconds(flops / (FLOPS * EFFICIENCY))
        ring = [2 * (peers - 1) / peers * 2 * parameters / BANDWIDTH for peers in range(1, pipelines + 1)]
        profiles.append(
            StageProfile(
                forward=forward,
                input_backward=forward,
                weight_backward=forward,
                # Reading and writing 16 bytes per parameter at a memory bandwidth of about 2 TB/s.
                optimizer=_milliseconds(2 * 16 * parameters / 2e12),
                reductions=tuple(map(_milliseconds, ring)),
                activation_bytes=round(layers * shape.layer_activation_bytes),
                weight_backward_bytes=round(layers * shape.layer_activation_bytes),
                weight_bytes=4 * parameters,
                optimizer_bytes=12 * parameters,
            )
        )
    transfer = _milliseconds(2 * shape.sequence * shape.hidden / BANDWIDTH)
    return Job(
        pipelines,
        stages,
        micro_batches,
        profiles=tuple(profiles),
        transfers=(transfer,) * (stages - 1),
        time_unit="ms",
        capacity_bytes=(MEMORY,) * stages,
    )


def _milliseconds(seconds: float) -> float:
    """Round to 4 decimals, which the planner keeps; a time above 0 becomes at least 0.0001."""
    return max(round(seconds * 1000, 4), 1e-4) if seconds else 0.0


# -- measured profiles --------------------------------------------------------------------------

Milliseconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
# Whole numbers have a limit too: they are computed with floats.
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES), INTEGER]
Text = Annotated[str, Field(max_length=300, pattern=PRINTABLE)]
Count = Annotated[int, Field(ge=1, le=2**31), INTEGER]
Clock = Literal["wall", "cpu"]

_FOLDER = Path(__file__).parent
T = TypeVar("T", bound=StageDoc)


class Timing(DocumentModel):
    """Milliseconds over `repeats` runs."""

    median: Milliseconds
    p10: Milliseconds
    p90: Milliseconds
    repeats: Count

    @model_validator(mode="after")
    def _ordered(self) -> Timing:
        if not self.p10 <= self.median <= self.p90:
            raise ValueError(f"p10 {self.p10} <= median {self.median} <= p90 {self.p90} does not hold")
        return self

    @property
    def spread(self) -> float:
        """(p90 - p10) / median; 0 where the median is 0."""
        return (self.p90 - self.p10) / self.median if self.median else 0.0


class Part(DocumentModel):
    """A measured piece of a model: its ops for one micro-batch, its step, and the bytes it keeps.

    The bytes are defined as in planner.jobs.job.StageProfile. A sharded optimizer's state is counted as a whole, since
    the last two workers of a stage would each hold all of it. reduced_bytes: what the peers' all-reduce sums.
    """

    name: Text
    forward: Timing
    input_backward: Timing
    weight_backward: Timing
    step: Timing
    activation_bytes: Bytes
    weight_backward_bytes: Bytes
    weight_bytes: Bytes
    optimizer_bytes: Bytes
    reduced_bytes: Bytes

    @property
    def spread(self) -> float:
        """The largest spread of its ops and its step, each weighted by its time relative to the longest."""
        timings = (self.forward, self.input_backward, self.weight_backward, self.step)
        longest = max(t.median for t in timings)
        return max((t.spread * t.median / longest for t in timings), default=0.0) if longest else 0.0


class Reductions(DocumentModel):
    """Times of the all-reduce of `bytes` among 2, 3, ... peers, in order, all on the profiled machine. Where the
    optimizer's state is sharded, the sums of each part go to the workers that step it, and its parameters to all."""

    bytes: Annotated[int, Field(ge=1, le=MAX_BYTES), INTEGER]
    by_peers: Annotated[tuple[Timing, ...], Field(fail_fast=True)]

    def milliseconds(self, size: int, peers: int) -> float:
        """Estimates the time for `size` bytes, in proportion. For more peers than were measured it grows as a ring's
        traffic does, (n - 1) / n of the bytes."""
        if peers < 2 or not self.by_peers or not size:
            return 0.0
        known = min(peers, len(self.by_peers) + 1)
        traffic = ((peers - 1) / peers) / ((known - 1) / known)
        return self.by_peers[known - 2].median * traffic * size / self.bytes


class Hardware(DocumentModel):
    """What the ops were measured on. accelerator: empty when they ran on the processor. clock: `wall`, or `cpu` for
    processor time, which other programs on the machine hardly lengthen. load: of the machine while measuring."""

    processor: Text
    cores: Count
    accelerator: Text = ""
    system: Text
    torch: Text
    threads: Count
    dtype: Text
    clock: Clock
    load: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    measured_on: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]


class Measurements(DocumentModel):
    """The measurements of a model, for any grid.

    cut: what the parts are. `stages`: each is a stage; `each`: each is a layer; `layers`: they are the first piece,
    one of `layers` equal layers, and the last piece. mode: how gradients were summed. sharded_over: number of workers
    over which a stage's optimizer state was sharded, one of which was measured; 0: it was not sharded. clipped: whether
    steps computed the norm of the gradients. transfers: times for the tensor between stages or layers, one per
    boundary; a single one where cut is `layers`. capacity_bytes: memory of one worker; 0 when not known.
    """

    profile_version: Annotated[Literal[1], INTEGER] = 1
    model: Text
    about: Text
    samples_per_micro_batch: Count
    mode: Literal["deterministic", "fast"]
    sharded_over: Annotated[int, Field(ge=0, le=2**31, exclude_if=lambda value: not value), INTEGER] = 0
    clipped: Annotated[bool, Field(strict=True, exclude_if=lambda value: not value)] = False
    hardware: Hardware
    cut: Literal["stages", "layers", "each"]
    layers: Annotated[int, Field(ge=0, le=MAX_LAYERS), INTEGER] = 0
    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=MAX_LAYERS, fail_fast=True)]
    boundary_bytes: Bytes
    transfers: Annotated[tuple[Timing, ...], Field(fail_fast=True)]
    reductions: Reductions | None
    capacity_bytes: Annotated[Bytes, Field(exclude_if=lambda value: not value)] = 0

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.cut == "layers" and (len(self.parts) != 3 or self.layers < 1 or len(self.transfers) != 1):
            raise ValueError("a profile by layers has 3 parts, at least 1 layer and 1 transfer")
        if self.cut != "layers" and len(self.transfers) != len(self.parts) - 1:
            what = "stages" if self.cut == "stages" else "layers"
            raise ValueError(
                f"{len(self.parts)} {what} have {len(self.parts) - 1} transfers, not {len(self.transfers)}"
            )
        return self

    @property
    def spread(self) -> float:
        """The largest spread of any part; transfers and reductions are left out."""
        return max(part.spread for part in self.parts)

    def job_for(self, pipelines: int, stages: int, micro_batches: int) -> Job:
        """Makes the job of this model on a grid. Raises InputError when the model can't be cut into these stages."""
        Job.uniform(pipelines, stages, micro_batches)  # the sizes are refused before anything is built
        members, transfers = self._cut(stages), tuple(t.median for t in self.transfers)
        if self.cut == "layers":
            transfers *= stages - 1
        elif self.cut == "each":
            ends = list(accumulate(map(len, members)))[:-1]
            transfers = tuple(transfers[end - 1] for end in ends)
        decimals = _decimals([sum(p.forward.median for p in group) for group in members])
        return Job(
            pipelines,
            stages,
            micro_batches,
            tuple(self._stage(group, pipelines, decimals) for group in members),
            tuple(round(t, decimals) for t in transfers),
            time_unit="ms",
            capacity_bytes=(self.capacity_bytes,) * stages if self.capacity_bytes else (),
        )

    def layered_job_for(self, pipelines: int, stages: int, micro_batches: int) -> Job:
        """Makes the job with layers, which can have any partition; the embedding and the head are layers too.

        Raises InputError where the profile is of whole stages.
        """
        if self.cut == "stages":
            raise InputError("--partition", self.cut, "a profile by layers: this one was measured by stages")
        Job.uniform(pipelines, stages, micro_batches)
        decimals = _decimals([part.forward.median for part in self.parts])
        # Nothing is sent behind the last layer.
        wires = [round(t.median, decimals) for t in self.transfers] or [0.0]
        wires = wires * 3 if self.cut == "layers" else [*wires, wires[-1]]
        made = [
            LayerProfile(**vars(self._stage([part], pipelines, decimals)), transfer=wire)
            for part, wire in zip(self.parts, wires, strict=False)
        ]
        if self.cut == "layers":
            first, layer, last = made
            made = [first, *[layer] * self.layers, last]
        return Job(
            pipelines,
            stages,
            micro_batches,
            time_unit="ms",
            capacity_bytes=(self.capacity_bytes,) * stages if self.capacity_bytes else (),
            layers=tuple(made),
        )

    def _cut(self, stages: int) -> list[list[Part]]:
        """Returns the parts of each stage."""
        if self.cut == "stages":
            if stages != len(self.parts):
                raise InputError("--stages", stages, f"{len(self.parts)}, as the profile was measured so")
            return [[part] for part in self.parts]
        if self.cut == "each":
            counts = balanced([_work(part) for part in self.parts], stages)
            if counts is None:
                raise InputError("--stages", stages, f"at most {len(self.parts)}, one layer for each")
            ends = accumulate(counts, initial=0)
            return [list(self.parts[a:b]) for a, b in pairwise(ends)]
        first, layer, last = self.parts
        members = [[layer] * count for count in spread_layers((first, layer, last), self.layers, stages)]
        members[0].insert(0, first)
        members[-1].append(last)
        return members

    def _stage(self, group: list[Part], pipelines: int, decimals: int) -> StageProfile:
        def total(op: str) -> float:
            timings: list[Timing] = [getattr(part, op) for part in group]
            return round(sum(t.median for t in timings), decimals)

        size = sum(p.reduced_bytes for p in group)
        reduce = self.reductions.milliseconds if self.reductions else lambda _size, _peers: 0.0
        measured = total("step") / self._share(self.sharded_over)
        # With a sharded optimizer fewer workers have more to step. The time beyond that with all workers is added to
        # their all-reduce.
        least = round(measured * self._share(pipelines), decimals)
        beyond = (measured * (self._share(n) - self._share(pipelines)) for n in range(1, pipelines + 1))
        times = tuple(round(reduce(size, n) + more, decimals) for n, more in enumerate(beyond, start=1))
        return StageProfile(
            forward=max(total("forward"), 10.0**-decimals),
            input_backward=total("input_backward"),
            weight_backward=total("weight_backward"),
            optimizer=least,
            reductions=times if any(times) else (),
            activation_bytes=sum(p.activation_bytes for p in group),
            weight_backward_bytes=sum(p.weight_backward_bytes for p in group),
            weight_bytes=sum(p.weight_bytes for p in group),
            optimizer_bytes=sum(p.optimizer_bytes for p in group),
        )

    def _share(self, peers: int) -> float:
        """The fraction of a stage's optimizer step that each of `peers` workers makes."""
        return min(1.0, 2 / max(1, peers)) if self.sharded_over else 1.0

    def profile(self, pipelines: int, stages: int, micro_batches: int) -> Profile:
        """Makes the document for a grid. Raises InputError."""
        make = self.layered_job_for if self.cut == "each" else self.job_for
        job = job_doc(make(pipelines, stages, micro_batches))
        return Profile(job=job, **{name: getattr(self, name) for name in Measurements.model_fields})


class Profile(Measurements):
    """Measurements with a job: that on the grid the profile was made for; `job_for` makes others."""

    job: JobDoc


def spread_layers(parts: tuple[Part, ...], layers: int, stages: int) -> list[int]:
    """Return layers of each stage: one each, then every further one to the stage with the least work so
    far, the work of the embedding and the head included. Raises InputError for more stages than layers."""
    if stages > layers:
        raise InputError("--stages", stages, f"at most {layers}, one layer for each")
    first, layer, last = map(_work, parts)
    counts, load = [1] * stages, [layer] * stages
    load[0] += first
    load[-1] += last
    for _ in range(layers - stages):
        s = min(range(stages), key=lambda i: load[i])
        counts[s] += 1
        load[s] += layer
    return counts


def _work(part: Part) -> float:
    return part.forward.median + part.input_backward.median + part.weight_backward.median


def shipped() -> list[str]:
    """Return the names of the profiles in this folder."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def _path(name: str | Path) -> Path:
    """Return the path of a shipped profile by its name, or of a file."""
    known = shape_name(str(name))
    return _FOLDER / f"{known}.json" if known in shipped() else Path(name)


def load_profile(name: str | Path) -> Profile:
    """Load a shipped profile by its name, or a file. Raises PlanError naming the field that is wrong."""
    path = _path(name)
    return _profile(path, _read(path))


def load(name: str | Path) -> Profile | JobDoc:
    """Load a profile as `load_profile`, or a job's document. Raises PlanError naming the field that is wrong."""
    path = _path(name)
    text = _read(path)
    try:
        document = read_json(text)
    except ValueError:
        document = None
    if isinstance(document, dict) and "profile_version" in document:
        return _profile(path, text)
    try:
        return read_model(JobDoc, text)
    except ValidationError as error:
        raise PlanError(f"{path} is not a job document: {first_problem(error)}") from None


def job_on(
    document: Profile | JobDoc,
    pipelines: int | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
    *,
    by_layers: bool = False,
) -> Job:
    """Make the job of a profile on a grid; sizes that are None are the document's. by_layers: with its measured layers.

    Raises InputError where the document has no job of that size: its stages can't be cut, or it has times of the
    all-reduce for fewer pipelines only.
    """
    own = document.job if isinstance(document, Profile) else document
    pipelines = own.pipelines if pipelines is None else pipelines
    stages = own.stages if stages is None else stages
    micro_batches = own.micro_batches if micro_batches is None else micro_batches
    if isinstance(document, Profile):
        if by_layers:
            return document.layered_job_for(pipelines, stages, micro_batches)
        return document.job_for(pipelines, stages, micro_batches)
    if stages != own.stages and not document.layers:
        raise InputError("--stages", stages, f"{own.stages}, as the profile has them")
    cut = document if stages == own.stages else of_layers(document, stages)
    return on_grid(cut, pipelines, micro_batches).job()


def of_layers(document: JobDoc, stages: int, **changes: Any) -> JobDoc:
    """Cut the same layers as evenly as possible into `stages`, and leave out what follows from the partition."""
    derived = {"profiles": (), "transfers": (), "backward_transfers": ()}
    capacity = document.capacity_bytes if isinstance(document.capacity_bytes, int) else ()
    inside = {w: x for w, x in document.speeds.items() if Worker.parse(w).stage < stages}
    new = {"stages": stages, "partition": (), "capacity_bytes": capacity, "speeds": inside}
    return document.model_copy(update=derived | new | changes)


def on_grid(document: JobDoc, pipelines: int, micro_batches: int) -> JobDoc:
    """Change the grid. For fewer pipelines the all-reduce times and the speeds are those of the document that apply."""

    def fewer(items: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(item.model_copy(update={"reductions": item.reductions[:pipelines]}) for item in items)

    changes: dict[str, Any] = {
        "pipelines": pipelines,
        "micro_batches": micro_batches,
        "profiles": () if document.layers else fewer(document.profiles),
        "transfers": () if document.layers else document.transfers,
        "backward_transfers": () if document.layers else document.backward_transfers,
        "layers": fewer(document.layers),
        "speeds": {w: x for w, x in document.speeds.items() if Worker.parse(w).pipeline < pipelines},
    }
    return document.model_copy(update=changes)


def _read(path: Path) -> bytes:
    try:
        return read_whole(path)
    except OSError as error:
        # The name of a profile, such as 6.7b, may look like a file with a suffix.
        named = f"; profiles by name: {', '.join(shipped())}" if path.suffix != ".json" else ""
        raise PlanError(f"{path} can't be read: {error.strerror or error}{named}") from None


def _profile(path: Path, text: bytes) -> Profile:
    try:
        return read_model(Profile, text)
    except ValidationError as error:
        raise PlanError(f"{path} is not a profile: {first_problem(error)}") from None


def _decimals(forwards: list[float]) -> int:
    """Choose decimals that give the shortest forward four significant digits, but at most 3, so that ticks stay few."""
    least = min((f for f in forwards if f > 0), default=1.0)
    return min(3, max(0, 3 - math.floor(math.log10(least))))
