"""Where a model is cut into stages does not show in the numbers."""

from __future__ import annotations

import pytest
import torch

from openrecycle.agent.checkpoints import Identity, find, load_layers, write_share
from openrecycle.agent.config.devices import seed_for
from openrecycle.agent.config.options import Optimization
from openrecycle.agent.examples.gpt import Gpt
from openrecycle.agent.models.layers import StageCuts, kind_of, partition_of, spans, wanted_of
from openrecycle.agent.models.state import StageState, Writer, joined, of_layers, pack
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.agent.stages.optimizer import StageOptimizer, stage_optimizer
from openrecycle.agent.stages.post_validation import judge
from openrecycle.agent.stages.stage import Stage, assemble
from openrecycle.agent.workers.relayout import regrouped
from openrecycle.planner.jobs.job import Job
from tests.agent.layered import Masking, Mixture, Noting
from tests.agent.local_jobs import TINY, LocalJob, Message, uncut
from tests.conftest import at_length, refuses

LAYERS = 6


def _bits(state):
    """All that a state says, whatever the order of its tensors."""
    return dict(state.document), {name: pack(StageState({}, {name: t}))[0] for name, t in state.tensors.items()}


def _sent(data):
    """As a transfer gives it."""
    parts = [t if t is None else t.contiguous() for t in (data if isinstance(data, tuple) else (data,))]
    return tuple(parts) if isinstance(data, tuple) else parts[0]


def _train(workload, partition: tuple[int, ...], optimization: Optimization, iterations: int = 3):
    """One pipeline, in this process: (losses, the state of all layers, the stages' optimizers)."""
    stages = len(partition)
    job = Job.uniform(1, stages, 2)
    cuts = StageCuts.of(workload, stages, partition, optimization.autocast)
    parts: list[tuple[Stage, StageOptimizer]] = []
    for stage in range(stages):
        made, _ = assemble(workload, job, cuts, stage, 0, optimization)
        parts.append((made, stage_optimizer(workload, made.module, made.gradients, optimization)))
    losses = []
    for iteration in range(iterations):
        for micro_batch in range(2):
            key = (0, micro_batch)
            seed = seed_for("micro-batch", 0, iteration, *key)
            x = workload.inputs(0, iteration, *key)
            targets = workload.targets(0, iteration, *key)
            *before, last = zip([None, *map(wanted_of, cuts.stage_io)], (made for made, _ in parts), strict=True)
            for wanted, made in before:
                x = _sent(made.forward(key, x, seed=seed, wanted=wanted))
            last[1].forward(key, x, seed=seed, loss=lambda y, t=targets: workload.loss(y, t) / 2, wanted=last[0])
            dy = None
            for made, _ in reversed(parts):
                dy = _sent(made.input_backward(key, dy))
            for made, _ in parts:
                made.weight_backward(key)
        validation = judge([optimizer.measure() for _, optimizer in parts], optimization.clip_norm)
        losses.append([optimizer.step(validation) for _, optimizer in parts][-1])
    optimizers = [optimizer for _, optimizer in parts]
    return losses, joined([optimizer.state() for optimizer in optimizers]), optimizers


GPT = Gpt(width=16, heads=2, layers=LAYERS, sequence=8, batch=2)
CLIPPED = Optimization(clip_norm=0.5)


@pytest.mark.parametrize(
    ("workload", "optimization"),
    [
        (GPT, CLIPPED),
        (GPT, Optimization(autocast="bf16")),
        (GPT, Optimization(autocast="fp16", clip_norm=0.5)),
        (Mixture(), CLIPPED),
        at_length(Mixture(), Optimization()),
        (Masking(), CLIPPED),
        (Masking(frozen=3), CLIPPED),
        (Masking(inner=Noting), CLIPPED),
    ],
    ids=["gpt", "gpt-bf16", "gpt-fp16", "mixture", "mixture-unclipped", "masking", "frozen-first", "unused"],
)
def test_every_partition_gives_the_same_bits(workload, optimization: Optimization) -> None:
    losses, state, _ = _train(workload, (LAYERS,), optimization, iterations=2)
    expected = _bits(state)
    for partition in ((1,) * LAYERS, (2, 1, 3))[: 2 if workload is GPT else 1]:
        other, state, optimizers = _train(workload, partition, optimization, iterations=2)
        assert other == losses
        assert _bits(state) == expected, partition
        hashes = "".join(optimizer.parameters_sha256() for optimizer in optimizers)
        assert len(hashes) == 64 * LAYERS


def test_a_state_is_taken_apart_and_put_together() -> None:
    _, whole, _ = _train(GPT, (6,), CLIPPED)
    parts = [of_layers(whole, span) for span in spans((2, 3, 1))]
    assert _bits(joined(parts)) == _bits(whole)
    _, _, (first, second) = _train(GPT, (2, 4), CLIPPED, iterations=0)
    for optimizer, span in ((first, range(2)), (second, range(2, 6))):
        optimizer.load_state(of_layers(whole, span))
        assert _bits(optimizer.state()) == _bits(of_layers(whole, span))


def test_a_checkpoint_is_read_by_stages_that_are_cut_elsewhere(tmp_path) -> None:
    _, whole, optimizers = _train(GPT, (2, 1, 3), CLIPPED)
    identity = Identity("gpt", LAYERS, 3, 1, 2, 0)
    for stage, optimizer in enumerate(optimizers):
        for peer in range(2):
            write_share(tmp_path, optimizer.share(Writer(peer, 2)), stage, (2, 1, 3)[stage], identity, 1, 3)
    assert find(tmp_path).partition == (2, 1, 3)
    for span in (range(6), range(1, 4), range(5, 6)):
        assert _bits(load_layers(tmp_path, span)) == _bits(of_layers(whole, span))


@pytest.mark.parametrize("partition", [(1, 2), (0, 6), (7, -1), (6,)])
def test_a_partition_that_does_not_fit_is_refused(partition: tuple[int, ...]) -> None:
    with refuses("partition"):
        partition_of(partition, 6, 2)


def test_an_even_partition() -> None:
    assert partition_of((), 6, 4) == (2, 2, 1, 1)
    with refuses("layers", 3):
        partition_of((), 3, 4)


@pytest.mark.chaos
@pytest.mark.processes
def test_a_job_cut_elsewhere_ends_with_the_same_bits_through_a_kill_and_a_return() -> None:
    """Real processes: the partition shows neither in the losses nor in the final hash."""
    workload = NamedWorkload("openrecycle.agent.examples.gpt:Gpt", TINY | {"layers": LAYERS})
    clip = Optimization(clip_norm=0.3)
    calm = uncut(iterations=6, workload=workload, optimization=clip)

    def act(job: LocalJob, line: Message) -> None:
        if "failure" in line:
            job.start("W1_1")

    cut = LocalJob(
        iterations=6,
        workload=workload,
        optimization=clip,
        partition=(3, 1, 2),
        kills=("W1_1@2:I1",),
        on_line=act,
    ).run()
    assert cut.dead == ["W1_1"]
    assert cut.losses == calm.losses and cut.lines[-1] == calm.lines[-1]


def test_a_step_is_undone_by_an_optimizer_that_has_layers_of_two_stages() -> None:
    """Layers have moved between the step and the news that a peer has not taken it."""
    _, after, optimizers = _train(GPT, (2, 2, 2), CLIPPED, iterations=3)
    _, before, _ = _train(GPT, (2, 2, 2), CLIPPED, iterations=2)
    span = range(1, 4)
    made = regrouped(GPT, optimizers[0], [optimizers[1]], span, CLIPPED, Job.uniform(1, 3, 2))
    for state, committed in ((after, 3), (before, 2)):
        if committed == 2:
            made.roll_back()
        expected, found = of_layers(state, span), made.state()
        assert (made.committed, made.settled) == (committed, True)
        assert found.tensors.keys() == expected.tensors.keys()
        for name, tensor in expected.tensors.items():
            assert torch.equal(found.tensors[name], tensor), name
    assert made.validation == optimizers[2].validation_before


@pytest.mark.parametrize("own", ["gpt", torch.zeros(2), 3])
def test_an_own_attribute_of_a_workload_does_not_say_how_it_is_cut(own: object) -> None:
    class Own(Gpt):
        kind = own

    assert kind_of(Own()) == kind_of(Gpt()) == "layer"
