"""Step, settlement, roll-back and transfer of a stage's state, exact to the bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from openrecycle.agent.models.layers import StageIOError
from openrecycle.agent.models.state import StageState, StateError, messages_for, pack, unpack
from openrecycle.agent.stages.gradients import GradientSum
from openrecycle.agent.stages.optimizer import StageOptimizer
from openrecycle.agent.stages.post_validation import CLEAN, SKIP, Slot, ValidationResult
from openrecycle.planner.jobs.errors import InputError
from tests.conftest import at_length
from tests.golden import golden

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "SGD, nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "SGD, nesterov, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adam, maximize": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, lr as a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda i: 0.9**i),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.PolynomialLR(o, 8)], optimizer=o
    ),
}


def _stage(
    seed: int = 0, optimizer: str = "AdamW", scheduler: str | None = None, *, clips: bool = True
) -> StageOptimizer:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    gradients = GradientSum(
        module.parameters(), terms=1, buffers=[b for b in module.buffers() if b.is_floating_point()]
    )
    built = OPTIMIZERS[optimizer](module.parameters())
    return StageOptimizer(module, built, gradients, SCHEDULERS[scheduler](built) if scheduler else None, clips=clips)


def _sum(stage: StageOptimizer, iteration: int) -> None:
    generator = torch.Generator().manual_seed(iteration)
    for tensor in (*stage.gradients.parameters, *stage.gradients.moving):
        stage.gradients.add(tensor, torch.randn(tensor.shape, generator=generator))
    stage.gradients.add_loss(torch.tensor(float(iteration)))


def _train(stage: StageOptimizer, iteration: int, validation: ValidationResult | None = CLEAN) -> None:
    _sum(stage, iteration)
    assert stage.step(validation) == iteration


def _everything(stage: StageOptimizer) -> tuple[Any, ...]:
    return copy.deepcopy(
        (
            stage.module.state_dict(),
            stage.optimizer.state_dict(),
            stage.scheduler.state_dict() if stage.scheduler else None,
            stage.post_validation,
        )
    )


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b


EVERY = [*((o, None) for o in OPTIMIZERS), *(("SGD, nesterov", s) for s in SCHEDULERS)]
# One of each kind of state: none, tensors and numbers, of its own order, the rate in it; schedulers within others.
_KINDS = (
    "SGD",
    "SGD, nesterov",
    "Adam, amsgrad",
    "AdamW, fused",
    "AdamW, lr as a tensor",
    "Adafactor",
    "Rprop",
    "ASGD",
)
_FEW = {*_KINDS, "SGD, momentum, foreach", "Adam, maximize", "StepLR", "OneCycleLR", "CyclicLR", "SequentialLR"}
SOME = [(o, s) if (s or o) in _FEW else at_length(o, s) for o, s in EVERY]


@pytest.mark.parametrize(("optimizer", "scheduler"), EVERY)
def test_roll_back_is_exact_also_of_the_first_step(optimizer: str, scheduler: str | None) -> None:
    stage = _stage(optimizer=optimizer, scheduler=scheduler)
    for i in range(5):
        before = _everything(stage)
        _train(stage, i, None)
        assert not _equal(_everything(stage), before)
        stage.roll_back()
        assert stage.committed == i and stage.settled
        assert _equal(_everything(stage), before)
        with pytest.raises(StateError, match="no snapshot"):
            stage.roll_back()
        _train(stage, i)


@pytest.mark.parametrize(("optimizer", "scheduler"), SOME)
def test_a_late_validation_leaves_what_an_early_one_would_have(optimizer: str, scheduler: str | None) -> None:
    """Clean, clipped and skipped steps, staggered against synchronous: every bit, and the roll-back after it."""
    late, early = (_stage(optimizer=optimizer, scheduler=scheduler) for _ in range(2))
    for i, validation in enumerate(
        [SKIP, CLEAN, ValidationResult(0.25), CLEAN, SKIP, ValidationResult(0.1), ValidationResult(0.5), CLEAN]
    ):
        before = _everything(late)
        _train(late, i, None)
        assert late.settle(validation) == (not validation.clean)
        _train(early, i, validation)
        assert _equal(_everything(late), _everything(early))
        if i % 2:
            late.roll_back()
            assert _equal(_everything(late), before)
            _train(late, i, validation)
            assert _equal(_everything(late), _everything(early))
        assert not late.gradients.buffer.any(), "nothing is left of what was lent"


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD, nesterov", at_length("Adam, amsgrad")])
def test_a_late_validation_of_shards_leaves_what_an_early_one_would_have(optimizer: str) -> None:
    """The gradients until then, and what the step has changed, lie where those of other workers were summed, whichever
    segments this one holds."""
    of_nine = ValidationResult(0.25, 4.0)
    stages = [_sharded(optimizer), _sharded(optimizer)]
    for iteration, validation in enumerate([CLEAN, of_nine, of_nine, CLEAN, of_nine]):
        for late, stage in zip((False, True), stages, strict=True):
            shards = stage.shards
            assert shards is not None
            if iteration == 2:
                first, *_, last = sorted(shards.held)
                state = stage.optimizer.state.get(shards.parts[first], {})
                for other in (0, 3, 4):  # as long as the first
                    stage.hold(other, copy.deepcopy(dict(state)))
                stage.release([last])
            _sum(stage, iteration)
            stage.take_measures(stage.measures())
            stage.step(None if late else validation)
            if late:
                assert stage.settle(validation) is not validation.clean
        ours, theirs = ([stage.shards.parts[k] for k in sorted(stage.shards.held)] for stage in stages)  # type: ignore[union-attr]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        kept, others = (
            [stage.optimizer.state.get(p, {}) for p in of] for stage, of in zip(stages, (ours, theirs), strict=True)
        )
        assert _equal(kept, others)
        # The others' come over the groups.
        with torch.no_grad():
            for a, b in zip(stages[0].shards.parts, stages[1].shards.parts, strict=True):  # type: ignore[union-attr]
                a.copy_(b)


def _sharded(optimizer: str) -> StageOptimizer:
    """What one of eight peers holds: two of its eight shards."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 256))
    sums = GradientSum(module.parameters(), terms=1)
    made = OPTIMIZERS[optimizer](module.parameters())
    stage = StageOptimizer(module, made, sums, clips=True, pipelines=8)
    assert stage.shards is not None
    stage.release([k for k, segment in enumerate(stage.shards.segments) if segment.shard % 8 not in (2, 5)])
    return stage


def test_nothing_goes_back_once_the_next_gradient_is_there() -> None:
    """The snapshot is where it is summed, and gone: nothing may come of half of it."""
    stage = _stage()
    _train(stage, 0)
    after = _everything(stage)
    _sum(stage, 1)
    with pytest.raises(StateError):
        stage.roll_back()
    assert _equal(_everything(stage), after) and stage.committed == 1
    stage.gradients.clear()
    _train(stage, 1, None)
    _sum(stage, 2)
    with pytest.raises(StateError):
        stage.settle(ValidationResult(0.5))


def test_the_order_in_which_a_factory_names_parameters_is_its_own() -> None:
    donor, newcomer = _stage(0), _stage(1)
    for group in newcomer.optimizer.param_groups:
        group["params"].reverse()
    _train(donor, 0)
    newcomer.load_state(donor.state())
    for stage in (donor, newcomer):
        _train(stage, 1)
    assert all(map(torch.equal, donor.module.parameters(), newcomer.module.parameters()))


@pytest.mark.parametrize(("optimizer", "scheduler"), SOME)
def test_a_newcomer_takes_over_everything(optimizer: str, scheduler: str | None) -> None:
    donor, newcomer = _stage(0, optimizer, scheduler), _stage(99, optimizer, scheduler)
    for i in range(3):
        _train(donor, i, CLEAN if i else SKIP)
    newcomer.load_state(donor.state())
    assert newcomer.committed == 3
    assert _equal(_everything(newcomer), _everything(donor))
    for i in range(3, 6):
        _train(donor, i)
        _train(newcomer, i)
    assert _equal(_everything(newcomer), _everything(donor))
    assert newcomer.parameters_sha256() == donor.parameters_sha256()


def _scattered(optimizer: str) -> StageOptimizer:
    """Parameters that do not lie in memory in the order of their indices."""
    torch.manual_seed(0)
    transposed = nn.Linear(6, 5)
    transposed.weight = nn.Parameter(transposed.weight.detach().t().contiguous().t())
    module = nn.Sequential(nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), transposed)
    sums = GradientSum(module.parameters(), terms=1)
    return StageOptimizer(module, OPTIMIZERS[optimizer](module.parameters()), sums, clips=True)


@pytest.mark.parametrize("optimizer", ["AdamW, fused", at_length("AdamW"), at_length("SGD, nesterov, foreach")])
def test_parameters_may_lie_in_memory_in_any_order(optimizer: str) -> None:
    """A fused step goes by what lies where, of a parameter, its gradient and its state; also on a newcomer, and in a
    step that is taken again."""
    stage, newcomer, plain = (_scattered(optimizer) for _ in range(3))
    for i in range(5):
        if i == 2:
            newcomer.load_state(unpack(*pack(stage.state())))
        for one in (stage, newcomer):
            _sum(one, i)
            one.step(None)
            one.settle(ValidationResult(0.5))
        generator = torch.Generator().manual_seed(i)
        for parameter in plain.module.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter).copy_(drawn * 0.5)
        plain.optimizer.step()
        assert stage.parameters_sha256() == plain.parameters_sha256()
    assert _equal(_everything(newcomer), _everything(stage))


def test_a_step_does_not_show_what_else_is_in_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever type the first parameter has, by which torch's Adafactor steps all others. Those of one type are
    stepped together: each step takes time of its own."""
    found, steps, plain = [], list[int](), torch.optim.Adafactor.step

    def step(optimizer: torch.optim.Optimizer) -> None:
        steps.append(len(optimizer.param_groups[0]["params"]))
        plain(optimizer)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.optim.Adafactor, "step", step)
    for types in ([torch.bfloat16] * 2 + [torch.float32] * 3, [torch.float32] * 3 + [torch.bfloat16] * 2):
        module = nn.ParameterList(nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in types)
        sums = GradientSum(module.parameters(), terms=1)
        stage = StageOptimizer(module, torch.optim.Adafactor(module.parameters()), sums)
        for parameter in stage.gradients.parameters:
            stage.gradients.add(parameter, torch.arange(16, dtype=parameter.dtype).view(4, 4) / 1024)
        stage.step()
        found.append({parameter.dtype: parameter.detach() for parameter in module})
    assert _equal(found[0][torch.float32], found[1][torch.float32])
    assert _equal(found[0][torch.bfloat16], found[1][torch.bfloat16])
    assert steps == [2, 3, 3, 2]


class Taught(nn.Module):
    """A teacher follows the student, and a buffer the teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("largest", torch.zeros(()))


def taught(named_parameters: Any, largest: torch.Tensor) -> torch.optim.Optimizer:
    weights = {name.partition(".")[2]: parameter for name, parameter in named_parameters}
    made = torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9)

    @torch.no_grad()
    def follow(*_: Any) -> None:
        weights["teacher.weight"].data.lerp_(weights["student.weight"], 0.5)
        largest.add_(weights["teacher.weight"].abs().max())

    made.register_step_post_hook(follow)
    return made


def _taught() -> StageOptimizer:
    torch.manual_seed(0)
    module = Taught()
    made = taught([(f"0.{n}", p) for n, p in module.named_parameters()], module.get_buffer("largest"))
    return StageOptimizer(module, made, GradientSum(module.parameters(), terms=1), clips=True)


def test_what_a_step_hook_changes_is_undone_too() -> None:
    """When a step is taken again, when it is skipped, and when it is rolled back; also by an optimizer that has taken
    over the layers."""
    late, early = _taught(), _taught()
    for i, validation in enumerate([CLEAN, ValidationResult(0.25), SKIP, ValidationResult(0.5)]):
        before = _everything(late)
        _train(late, i, None)
        late.settle(validation)
        _train(early, i, validation)
        assert _equal(_everything(late), _everything(early))
        late.roll_back()
        assert _equal(_everything(late), before)
        _train(late, i, validation)
    module, undone = late.module, _everything(late)
    _train(late, 4)
    parameters = [(f"0.{n.partition('.')[2]}", p) for n, p in module.named_parameters()]
    sums = GradientSum(module.parameters(), terms=1)
    heir = StageOptimizer(module, taught(parameters, next(module.buffers())), sums, clips=True)
    heir.adopt([late])
    heir.roll_back()
    assert _equal(_everything(heir), undone)


def test_what_is_trained_stays_the_same() -> None:
    """Of a parameter that is thawed, no gradient was summed."""
    stage = _taught()
    _train(stage, 0)
    stage.module.get_parameter("0.teacher.bias").requires_grad_(True)
    _sum(stage, 1)
    with pytest.raises(StageIOError, match=r"0\.teacher\.bias"):
        stage.step()


def test_a_rolled_back_stage_redoes_the_step_to_the_same_bits() -> None:
    stage, reference = _stage(), _stage()
    for i in range(4):
        _train(stage, i)
        _train(reference, i)
        if i in (0, 2):
            stage.roll_back()
            _train(stage, i)
    assert _equal(_everything(stage), _everything(reference))


def test_a_damaged_state_is_refused_and_changes_nothing() -> None:
    donor, taker = _stage(), _stage(1)
    _train(donor, 0)
    header, messages = pack(donor.state())
    before = _everything(taker)
    damaged = [message.clone() for message in messages]
    damaged[0][5] ^= 1
    lie = json.loads(header) | {"document": json.loads(header)["document"].replace('"committed": 1', '"committed": 2')}
    for bad_header, bad_messages in (
        (header, damaged),
        (header, messages[:-1]),
        (header, [*messages[:-1], messages[-1][:-1]]),
        (json.dumps(lie).encode(), messages),
    ):
        with pytest.raises(StateError, match="checksum"):
            taker.load_state(unpack(bad_header, bad_messages))
    for unreadable in (b"{", b"[]", b"{}", b'{"document": 3, "tensors": [[1]], "sha256": ""}'):
        with pytest.raises(StateError, match="unreadable header"):
            taker.load_state(unpack(unreadable, messages))
    assert _equal(_everything(taker), before)


def test_what_is_large_is_a_message_of_its_own_without_a_copy() -> None:
    state = StageState(
        {"some": "words"},
        {
            "first": torch.arange(3.0),
            "nothing": torch.empty(0, 4),
            "second": torch.arange(5, dtype=torch.int16),
            "large": torch.randn(300, 1000),
            "turned": torch.randn(600, 500).t(),
            "last": torch.tensor(True),
        },
    )
    header, messages = pack(state)
    assert [m.numel() for m in messages] == [22, 1_200_000, 1_200_000, 1]
    assert messages[1].data_ptr() == state.tensors["large"].data_ptr()
    assert [m.shape for m in messages_for(header)] == [m.shape for m in messages]
    taken = unpack(header, messages)
    assert taken.document == state.document and taken.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(taken.tensors[name], tensor) for name, tensor in state.tensors.items())


def test_a_state_that_nobody_else_uses_is_not_copied() -> None:
    donor, taker = _stage(), _stage(1)
    _train(donor, 0)
    given = {name: tensor.clone() for name, tensor in donor.state().tensors.items()}
    addresses = {t.data_ptr() for name, t in given.items() if name.startswith("optimizer.")}

    def kept() -> set[int]:
        return {t.data_ptr() for name, t in taker.state().tensors.items() if name.startswith("optimizer.")}

    taker.load_state(StageState(donor.state().document, given))
    assert addresses and not kept() & addresses
    taker.load_state(StageState(donor.state().document, given), own=True)
    assert kept() == addresses
    assert _equal(_everything(taker), _everything(donor))


def test_a_state_of_another_stage_is_refused_and_changes_nothing() -> None:
    taker = _stage(1, "SGD")
    before = _everything(taker)
    wide = nn.Linear(6, 7)
    narrow = nn.Linear(6, 6)
    for donor, complaint in (
        (_stage(), "optimizer: got AdamW, expected SGD"),
        (_stage(0, "SGD", "StepLR"), "scheduler: got StepLR, expected None"),
        (StageOptimizer(wide, OPTIMIZERS["SGD"](wide.parameters()), GradientSum(wide.parameters(), terms=1)), "model"),
    ):
        with pytest.raises(StateError, match=complaint):
            taker.load_state(donor.state())
    assert _equal(_everything(taker), before)
    other = StageOptimizer(narrow, OPTIMIZERS["SGD"](narrow.parameters()), GradientSum(narrow.parameters(), terms=1))
    wide_state = StageOptimizer(wide, OPTIMIZERS["SGD"](wide.parameters()), GradientSum(wide.parameters(), terms=1))
    with pytest.raises(StateError, match=golden("weight-shape-7-6-of")):
        other.load_state(wide_state.state())


def test_only_what_needs_nothing_but_gradients_is_driven() -> None:
    module = nn.Linear(2, 2)
    gradients = GradientSum(module.parameters(), terms=1)
    with pytest.raises(InputError, match=r"LBFGS.*no closure"):
        StageOptimizer(module, torch.optim.LBFGS(module.parameters()), gradients)
    sgd = torch.optim.SGD(module.parameters())
    with pytest.raises(InputError, match=r"ReduceLROnPlateau.*no metric"):
        StageOptimizer(module, sgd, gradients, lr_scheduler.ReduceLROnPlateau(sgd))


def test_a_stage_that_knows_its_gradients_to_be_useless_leaves_its_parameters_alone() -> None:
    stage = _stage()
    before = stage.parameters_sha256()
    parameter = next(iter(stage.module.parameters()))
    stage.gradients.add(parameter, torch.full(parameter.shape, float("nan")))
    assert stage.measure().rejected
    stage.step(None)
    assert stage.slot.rejected and not stage.settled
    assert stage.parameters_sha256() == before and stage.committed == 1
    assert stage.settle(SKIP)
    assert stage.parameters_sha256() == before and stage.post_validation.skipped == 1
    stage.roll_back()
    assert stage.committed == 0 and stage.slot == Slot() and stage.post_validation.skipped == 0


def test_the_norm_is_that_of_torch() -> None:
    stage = _stage()
    _sum(stage, 7)
    norm = sum(stage.measure().squared_norms) ** 0.5
    stage.gradients.write_gradients()
    torch_norm = nn.utils.get_total_norm([p.grad for p in stage.module.parameters() if p.grad is not None])
    assert norm == pytest.approx(float(torch_norm), rel=1e-6)
    assert _stage(clips=False).measure() == Slot()


def test_a_stage_that_is_not_trained_has_nothing_to_clip() -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    stage = StageOptimizer(
        module, torch.optim.SGD(module.parameters(), lr=0.1), GradientSum(module.parameters(), terms=1), clips=True
    )
    before = stage.parameters_sha256()
    stage.step(ValidationResult(0.5))
    stage.step(None)
    assert stage.settle(ValidationResult(0.5))
    assert stage.parameters_sha256() == before and stage.committed == 2


class Noisy(torch.optim.SGD):
    """Draws noise in every step, as optimizers with stochastic rounding do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


@pytest.mark.parametrize("late", [False, True])
def test_what_a_step_draws_is_that_of_all_peers(late: bool) -> None:
    """Whatever each has run before; again, when a step is taken again; and another one in each step, and job."""

    def stepped(ran: int, seed: int = 0, *, undone: bool = False) -> list[torch.Tensor]:
        parameter = nn.Parameter(torch.zeros(3))
        module = nn.ParameterList([parameter])
        sums = GradientSum(module.parameters(), terms=1)
        stage = StageOptimizer(module, Noisy(module.parameters(), 0.1), sums, clips=late, seed=seed)
        out = []
        for _ in range(2):
            for again in (True, False) if undone else (False,):
                torch.manual_seed(ran)
                sums.add(parameter, torch.ones(3))
                stage.step(None if late else CLEAN)
                if late:
                    stage.settle(ValidationResult(0.5))
                if again:
                    stage.roll_back()
            out.append(parameter.detach().clone())
        return out

    one, other, again = stepped(1), stepped(2), stepped(3, undone=True)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, other, again, strict=True))
    assert not torch.equal(one[0], one[1] - one[0]) and not torch.equal(one[0], stepped(1, seed=1)[0])
