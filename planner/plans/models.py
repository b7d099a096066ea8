"""Analytic profiles of the papers' model shapes: op times and bytes from FLOPs and bandwidth.

FLOPs and bytes per layer are those of Narayanan et al. (Efficient Large-Scale Language Model
Training on GPU Clusters, 2021) and Korthikanti et al. (Reducing Activation Recomputation, 2022),
without recomputation. An analytic profile is a first guess: a measured one is better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.jobs.job import Job, StageProfile


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

    def layer_flops(self, samples: int) -> float:
        """Of one layer's forward for so many samples; the gradients of input and weights take as many each."""
        return samples * self.sequence * (24 * self.hidden**2 + 4 * self.sequence * self.hidden)

    def head_flops(self, samples: int) -> float:
        """Of the forward of the vocabulary's projection."""
        return 2.0 * samples * self.sequence * self.hidden * self.vocabulary

    def layer_activation_bytes(self, samples: int) -> float:
        """What one layer keeps between forward and backward, in 16 bits."""
        return samples * self.sequence * self.hidden * (34 + 5 * self.heads * self.sequence / self.hidden)


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


@dataclass(frozen=True)
class WorkerHardware:
    """One worker. flops: peak per second in 16 bits. efficiency: share of it that ops reach.

    bandwidth: bytes per second between workers. memory: bytes.
    """

    name: str = "A100 80 GB, 100 Gb/s"
    flops: float = 312e12
    efficiency: float = 0.45
    bandwidth: float = 12.5e9
    memory: int = 80 * 10**9

    def __post_init__(self) -> None:
        for field in ("flops", "efficiency", "bandwidth", "memory"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"hardware.{field}", value, "a number above 0")


def model_shape(name: str) -> ModelShape:
    """Raises InputError."""
    if name not in SHAPES:
        raise InputError("--model", name, "one of " + ", ".join(SHAPES))
    return SHAPES[name]


def analytic_job(
    shape: ModelShape,
    pipelines: int,
    stages: int,
    micro_batches: int,
    *,
    samples: int = 1,
    hardware: WorkerHardware | None = None,
) -> Job:
    """The job in milliseconds; each micro-batch has so many samples. Raises InputError.

    The first stage also holds the embedding, the last one the projection to the vocabulary, tied to it.
    """
    machine = hardware or WorkerHardware()
    if isinstance(samples, bool) or not 1 <= samples <= 4096:
        raise InputError("samples per micro-batch", samples, "a whole number from 1 to 4096")
    if not 1 <= stages <= shape.layers:
        raise InputError("stages", stages, f"a number from 1 to {shape.layers}, the layers of {shape.name}")
    share, more = divmod(shape.layers, stages)
    profiles = []
    for stage in range(stages):
        # Stages in the middle take what does not divide: the ends have the embedding.
        layers = share + (1 <= stage <= more if more < stages - 1 else stage < more)
        parameters = layers * shape.layer_parameters
        flops = layers * shape.layer_flops(samples)
        if stage in (0, stages - 1):
            parameters += shape.vocabulary * shape.hidden
        if stage == stages - 1:
            flops += shape.head_flops(samples)
        forward = _milliseconds(flops / (machine.flops * machine.efficiency))
        ring = [2 * (peers - 1) / peers * 2 * parameters / machine.bandwidth for peers in range(1, pipelines + 1)]
        profiles.append(
            StageProfile(
                forward=forward,
                input_backward=forward,
                weight_backward=forward,
                # Reading and writing 16 bytes per parameter at a memory bandwidth of about 2 TB/s.
                optimizer=_milliseconds(2 * 16 * parameters / 2e12),
                reductions=tuple(map(_milliseconds, ring)),
                activation_bytes=round(layers * shape.layer_activation_bytes(samples)),
                weight_backward_bytes=round(layers * shape.layer_activation_bytes(samples)),
                weight_bytes=4 * parameters,
                optimizer_bytes=12 * parameters,
            )
        )
    transfer = _milliseconds(2 * samples * shape.sequence * shape.hidden / machine.bandwidth)
    return Job(
        pipelines,
        stages,
        micro_batches,
        profiles=tuple(profiles),
        transfers=(transfer,) * (stages - 1),
        time_unit="ms",
        capacity_bytes=(machine.memory,) * stages,
    )


def _milliseconds(seconds: float) -> float:
    """To 4 decimals, which the planner keeps; what takes any time takes at least the last of them."""
    return max(round(seconds * 1000, 4), 1e-4) if seconds else 0.0
