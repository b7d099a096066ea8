"""Analytic profiles of the papers' model shapes: op times and bytes from FLOPs and bandwidth.

FLOPs and bytes per layer are those of Narayanan et al. (Efficient Large-Scale Language Model
Training on GPU Clusters, 2021) and Korthikanti et al. (Reducing Activation Recomputation, 2022),
without recomputation. An analytic profile is a first guess: a measured one is better.
"""

from __future__ import annotations

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

    @property
    def layer_flops(self) -> float:
        """Of one layer's forward of a sample; the gradients of input and weights take as many each."""
        return self.sequence * (24 * self.hidden**2 + 4 * self.sequence * self.hidden)

    @property
    def head_flops(self) -> float:
        """Of the forward of the vocabulary's projection."""
        return 2.0 * self.sequence * self.hidden * self.vocabulary

    @property
    def layer_activation_bytes(self) -> float:
        """What one layer keeps of a sample between forward and backward, in 16 bits."""
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


# A worker: A100 80 GB, 100 Gb/s. FLOPS in 16 bits, of which ops reach a share; bytes per second between workers; bytes.
FLOPS, EFFICIENCY, BANDWIDTH, MEMORY = 312e12, 0.45, 12.5e9, 80 * 10**9


def shape_name(text: str) -> str:
    """As it is spelled here and in the published tables: `gpt3-6.7b` is taken for gpt-3-6.7b."""
    return f"gpt-3-{text[5:]}" if text.startswith("gpt3-") else text


def model_shape(name: str) -> ModelShape:
    """Raises InputError."""
    name = shape_name(name)
    if name not in SHAPES:
        raise InputError("--model", name, "one of " + ", ".join(SHAPES))
    return SHAPES[name]


def analytic_job(shape: ModelShape, pipelines: int, stages: int, micro_batches: int) -> Job:
    """The job in milliseconds; each micro-batch has one sample. Raises InputError.

    The first stage also holds the embedding, the last one the projection to the vocabulary, tied to it.
    """
    if not 1 <= stages <= shape.layers:
        raise InputError("stages", stages, f"a number from 1 to {shape.layers}, the layers of {shape.name}")
    share, more = divmod(shape.layers, stages)
    profiles = []
    for stage in range(stages):
        # Stages in the middle take what does not divide: the ends have the embedding.
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
    """To 4 decimals, which the planner keeps; what takes any time takes at least the last of them."""
    return max(round(seconds * 1000, 4), 1e-4) if seconds else 0.0
