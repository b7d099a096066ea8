"""Models of transformers: cut, split, trained through kills, written and read again."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from openrecycle import Checkpoints, Data, Evaluation, Faults, Job, PadCollate, Planning, load_weights
from openrecycle.agent.checkpoints import save_weights
from openrecycle.agent.jobs.results import TrainingResult
from openrecycle.agent.jobs.trainer import ResilientTrainer
from openrecycle.agent.models.layers import LayerStack, TensorSpec, build_layer, build_layers
from openrecycle.agent.models.torch_pipelining import modules_of
from openrecycle.planner.jobs.errors import InputError
from tests.agent import language_models, streamed_jobs
from tests.agent.language_models import (
    BLOCKS,
    CONFIGS,
    TOKENS,
    VOCABULARY,
    Words,
    gpt2,
    llama,
    of_four,
    trainer,
    transformers,
)
from tests.agent.launches import warm
from tests.agent.node_runs import lines, two_nodes
from tests.agent.test_split_architectures import Case, run_split, unsplit
from tests.conftest import at_length
from tests.golden import golden

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# The modules of so many families are imported in one test process, not in each.
pytestmark = pytest.mark.xdist_group("transformers")
ROOT = Path(__file__).resolve().parents[2]
LAST = BLOCKS + 1


@pytest.fixture(scope="module")
def models_are_there() -> None:
    """In the process that workers are forked from, as where a user's job starts it. Else each imports them: a job takes
    6.3 CPU seconds instead of 1.8."""
    kinds = ("gpt2", "llama", "mixtral")
    warm("tests.agent.language_models", *(f"transformers.models.{kind}.modeling_{kind}" for kind in kinds))


def whole(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return model.train()


@contextlib.contextmanager
def cut(model: Any, *passed: str) -> Iterator[Any]:
    from openrecycle.agent.models.hugging_face import pretrained

    with contextlib.ExitStack() as files:
        yield replace(pretrained(model, files), passed=passed)


def tokens(*, padded: bool) -> tuple[Tensor, Tensor]:
    """On both sides, where there is padding."""
    torch.manual_seed(1)
    ids, mask = torch.randint(1, VOCABULARY, (3, TOKENS)), torch.ones(3, TOKENS, dtype=torch.long)
    if padded:
        mask[0, 7:] = mask[1, :3] = 0
    return ids, mask


# -- the cut -----------------------------------------------------------------------------------


# Without padding, or autocast, these are enough.
_PLAIN = ("gpt2", "llama", "mixtral")
_EITHER_WAY = [
    (family, given) if given or family in _PLAIN else at_length(family, given)
    for family in CONFIGS
    for given in (False, True)
]


@pytest.mark.parametrize(("family", "padded"), _EITHER_WAY)
def test_the_layers_do_what_the_whole_model_does(family: str, padded: bool) -> None:
    from openrecycle.agent.models.hugging_face import pretrained_job

    """To the bit, loss and gradients."""
    model = whole(CONFIGS[family]())
    ids, mask = tokens(padded=padded)
    labels = ids.masked_fill(mask == 0, -100)
    wanted = model(input_ids=ids, attention_mask=mask if padded else None, labels=labels, use_cache=False).loss
    wanted.backward()
    batch = {"input_ids": ids, **({"attention_mask": mask} if padded else {})}
    with contextlib.ExitStack() as files:
        source, loss_of, data, _ = pretrained_job(model, Data(lambda *_: batch), files)
        layers = {k: source(k, source.layer_count) for k in range(source.layer_count)}
    own = {name: p for layer in layers.values() for name, p in layer.named_parameters()}
    for name, of in source.cut.tied.items():
        own[name].data.copy_(own[of].data)
    assert len(source.cut.tied) == model.config.tie_word_embeddings
    inputs, targets = data.samples(0, 0, 0)
    assert torch.equal(targets, labels)
    loss = loss_of(LayerStack(layers)(*inputs, seed=0), targets)
    assert torch.equal(loss, wanted)
    loss.backward()
    for name, parameter in model.named_parameters():
        copies = [own[copy].grad for copy, of in source.cut.tied.items() if of == name]
        assert torch.equal(sum(copies, own[name].grad), parameter.grad), name


def test_a_layer_has_its_own_parameters_by_the_models_names() -> None:
    model = whole(llama())
    with cut(model) as source:
        layers = [source(k, LAST + 1) for k in range(LAST + 1)]
    names = [list(layer.state_dict()) for layer in layers]
    assert names[0] == ["model.embed_tokens.weight"] and names[LAST] == ["model.norm.weight", "lm_head.weight"]
    assert all(name.startswith("model.layers.1.") for name in names[2])
    state = model.state_dict()
    assert sorted(name for own in names for name in own) == sorted(state)
    for layer in layers:
        for name, value in layer.state_dict().items():
            assert torch.equal(value, state[name])


@pytest.mark.parametrize(
    ("family", "autocast", "frozen"),
    [
        (family, autocast, frozen)
        if family in _PLAIN or (autocast and not frozen)
        else at_length(family, autocast, frozen)
        for family in CONFIGS
        for autocast, frozen in ((False, 0), (True, 0), (True, 2), (False, 2))
    ],
)
def test_what_passes_between_layers_is_what_is_said_beforehand(family: str, autocast: bool, frozen: int) -> None:
    """frozen: so many layers at the beginning."""
    ids, mask = tokens(padded=True)
    with cut(CONFIGS[family](), "attention_mask") as source:
        names = [n for k in range(frozen) for n, _ in source.cut.part(k, source.passed).named_parameters()]
        source = replace(source, frozen=frozenset(names))
        said = source.stage_io(ids.shape)
        layers = [source(k, LAST + 1) for k in range(LAST + 1)]
    passed: tuple[Tensor, ...] = (ids, 1 - mask)
    for layer, boundary in zip(layers[:-1], said, strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            passed = layer(*passed)
        assert tuple(map(TensorSpec.of, passed)) == boundary


def test_a_padding_token_is_seen_by_none() -> None:
    ids, mask = tokens(padded=True)
    other = ids.masked_fill(mask == 0, 5)
    with cut(gpt2(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0), "attention_mask") as source:
        stack = LayerStack({k: source(k, LAST + 1) for k in range(LAST + 1)})
        one, two = stack(ids, 1 - mask, seed=0), stack(other, 1 - mask, seed=0)
        unmasked = stack(other, torch.zeros_like(mask), seed=0)
    assert torch.equal(one[mask == 1], two[mask == 1])
    assert not torch.equal(one[1, 3:], unmasked[1, 3:])


def test_packed_texts_do_not_see_each_other() -> None:
    ids, _ = tokens(padded=False)
    other = ids.clone()
    other[:, :5] = 7
    positions = torch.cat([torch.arange(5), torch.arange(TOKENS - 5)]).expand(3, -1)
    with cut(llama(), "position_ids") as source:
        stack = LayerStack({k: source(k, LAST + 1) for k in range(LAST + 1)})
        assert torch.equal(stack(ids, positions, seed=0)[:, 5:], stack(other, positions, seed=0)[:, 5:])


def test_a_layers_first_values_do_not_depend_on_what_was_built_before() -> None:
    """A worker that starts anew builds others first."""
    workloads = [trainer(gpt2()).workload() for _ in range(2)]
    early, _ = build_layer(workloads[0], 0, LAST + 1, 0), build_layer(workloads[1], 3, LAST + 1, 0)
    late = build_layer(workloads[1], 0, LAST + 1, 0)
    assert all(torch.equal(a, b) for a, b in zip(early.parameters(), late.parameters(), strict=True))
    head = build_layers(workloads[1], range(2, LAST + 1), LAST + 1, 0)
    assert torch.equal(head.get_parameter(f"{LAST}.lm_head.weight"), early.get_parameter("transformer.wte.weight"))


@pytest.mark.parametrize("family", ["gpt2", "llama", at_length("gemma3"), at_length("mixtral")])
def test_it_may_be_cut_where_layers_are_built_without_memory(family: str) -> None:
    """As a check before the start builds them, which is the first to ask where a worker makes its workload anew."""
    with cut(CONFIGS[family]()) as early, cut(CONFIGS[family]()) as late:
        with torch.device("meta"):
            bare = [late(k, LAST + 1) for k in range(LAST + 1)]
        assert all(p.is_meta for layer in bare for p in layer.parameters())
        for k in range(LAST + 1):
            torch.manual_seed(k)
            one = early(k, LAST + 1).state_dict()
            torch.manual_seed(k)
            other = late(k, LAST + 1).state_dict()
            assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_weights_are_drawn_as_the_model_draws_them(family: str) -> None:
    """Norms 1, biases 0, and what is scaled by depth is."""
    config = CONFIGS[family]()
    torch.manual_seed(1)  # layers are drawn from what torch draws next
    with cut(config) as source:
        drawn = {n: v for k in range(LAST + 1) for n, v in source(k, LAST + 1).state_dict().items()}
    for name, value in whole(config).state_dict().items():
        mean, std = value.mean().item(), value.std().item()
        several = 5 / value.numel() ** 0.5  # standard errors, of a mean in units of the deviation
        assert drawn[name].std().item() == pytest.approx(std, rel=several, abs=1e-9), name
        assert drawn[name].mean().item() == pytest.approx(mean, abs=several * std + 1e-9), name


def test_the_routers_loss_counts_where_the_config_says_so() -> None:
    from openrecycle.agent.models.hugging_face import pretrained_job

    """Padding does not count in it either, as in the whole model's."""
    ids, mask = tokens(padded=True)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    losses = []
    for family in ("mixtral", "mixtral, balanced"):
        model = whole(CONFIGS[family]())
        expected = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        with contextlib.ExitStack() as files:
            source, loss_of, data, _ = pretrained_job(model, Data(lambda *_: batch), files)
            stack = LayerStack({k: source(k, LAST + 1) for k in range(LAST + 1)})
        inputs, labels = data.samples(0, 0, 0)
        loss = loss_of(stack(*inputs, seed=0), labels)
        assert torch.equal(loss, expected)
        losses.append(loss.item())
    assert losses[1] - losses[0] > 0.1


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing_stays_on_and_changes_no_bit() -> None:
    model = whole(llama())
    ids, _ = tokens(padded=False)
    gradients = []
    for _ in range(2):
        with cut(model) as source:
            stack = LayerStack({k: source(k, LAST + 1) for k in range(LAST + 1)})
        assert source.checkpointing == bool(gradients)
        stack(ids, seed=0).square().sum().backward()
        gradients.append([p.grad for p in stack.parameters()])
        model.gradient_checkpointing_enable()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# -- its backward ------------------------------------------------------------------------------


def _stage(family: str) -> Case:
    """The middle block, on a micro-batch with padding."""

    def build() -> nn.Module:
        with cut(CONFIGS[family](), "attention_mask") as source:
            return source(2, LAST + 1)

    def inputs() -> tuple[Tensor, ...]:
        padding = torch.zeros(3, TOKENS, dtype=torch.long)
        padding[0, 8:] = 1
        return torch.randn(3, TOKENS, 32), padding

    return Case(build, inputs, "torch" if family in _WITH_EXPERTS else "deferred")


_WITH_EXPERTS = ("mixtral", "mixtral, balanced", "qwen2 with experts", "qwen3 with experts")


# One with each kind of attention, and of experts; the others are made of the same parts.
_BACKWARDS = ("gpt2", "llama", "gemma3", "mixtral, balanced", "qwen3 with experts")


@pytest.mark.parametrize("family", [family if family in _BACKWARDS else at_length(family) for family in CONFIGS])
def test_the_backward_of_a_block_is_split_and_keeps_its_bits(family: str) -> None:
    """Experts are no Linear, so of those torch's own split does more."""
    run_split(_stage(family), unsplit(_stage(family)))


def test_gpt2s_transposed_linear_is_deferred_under_autocast_too() -> None:
    case = _stage("gpt2")
    run_split(case, unsplit(case, autocast=True), autocast="bf16")


# -- jobs --------------------------------------------------------------------------------------


@cache
def undisturbed(family: str) -> TrainingResult:
    return trainer(_job_models()[family], data=of_four(Words(padded=family == "llama"))).fit(iterations=6)


@cache
def _job_models() -> dict[str, Any]:
    """GPT-2 draws its weights, drops out and ties; the llama has weights."""
    return {"gpt2": gpt2(), "llama": whole(llama())}


@pytest.mark.usefixtures("models_are_there")
@pytest.mark.processes
@pytest.mark.parametrize("family", [at_length("gpt2"), at_length("llama")])
def test_a_kill_does_not_show_and_what_is_written_is_read_again(family: str, tmp_path: Path) -> None:
    calm = undisturbed(family)
    model = _job_models()[family]
    data, faults = of_four(Words(padded=family == "llama")), Faults(kill=["W1_1@2:F2"])
    hurt = trainer(model, data=data, faults=faults).fit(iterations=6)
    assert hurt.losses == calm.losses and hurt.losses[-1] < hurt.losses[0]
    assert hurt.parameters_sha256 == calm.parameters_sha256
    assert [recovery.worker for recovery in hurt.recoveries] == ["W1_1"]
    hurt.save_pretrained(tmp_path / "trained")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert (read.lm_head.weight is read.get_input_embeddings().weight) == (family == "gpt2")
    state, trained = read.state_dict(), [hurt.state_dict(k) for k in range(LAST + 1)]
    assert sorted(name for layer in trained for name in layer) == sorted(state)
    for layer in trained:
        assert all(torch.equal(value, state[name]) for name, value in layer.items())
    with cut(str(tmp_path / "trained")) as source:
        for k, layer in enumerate(trained):
            again = source(k, LAST + 1).state_dict()
            assert all(torch.equal(again[name], value) for name, value in layer.items() if name not in source.cut.tied)


@pytest.mark.chaos
@pytest.mark.usefixtures("models_are_there")
@pytest.mark.processes
def test_two_nodes_train_it_by_the_name_of_a_function(tmp_path: Path) -> None:
    """Each makes its workload of what the function returns; a death does not show either."""
    named = ("--workload", "tests.agent.language_models:workload", "--workload-options", "{}")
    grid = ("--stages", "2", "--micro-batches", "3", "--iterations", "3", "--kill", "W1_1@1:F2")
    with two_nodes(tmp_path, *named, *grid, "--weights", str(tmp_path / "trained")) as (lead, node):
        assert (lead.wait(90), node.wait(90)) == (0, 0), (tmp_path / "lead.log").read_text()
    *_, last = lines(tmp_path)
    here = trainer(llama()).fit(iterations=3)
    assert last["final"]["parameters_sha256"] == here.parameters_sha256
    state = load_weights(whole(llama()), tmp_path / "trained").state_dict()
    for k in range(LAST + 1):
        assert all(torch.equal(value, state[name]) for name, value in here.state_dict(k).items())


def test_a_folder_of_weights_becomes_a_model_of_transformers(tmp_path: Path) -> None:
    """Also where its head is its embedding, of which both layers have a copy."""
    torch.manual_seed(1)
    trained = transformers.AutoModelForCausalLM.from_config(gpt2())
    with cut(trained) as source:
        layers = [source(k, LAST + 1).state_dict() for k in range(LAST + 1)]
    layers[LAST]["lm_head.weight"] = layers[0]["transformer.wte.weight"]
    for k, layer in enumerate(layers):
        save_weights(str(tmp_path / "layers"), k, layer)
    load_weights(whole(gpt2()), tmp_path / "layers").save_pretrained(tmp_path / "trained")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert all(torch.equal(value, read.state_dict()[name]) for name, value in trained.state_dict().items())
    with pytest.raises(InputError, match="model: got 'GPT2LMHeadModel'"):
        load_weights(whole(gpt2(n_layer=2)), tmp_path / "layers")


def test_the_weights_of_a_model_do_not_come_with_a_function() -> None:
    """Each worker would write them, into a folder that nobody removes when it is killed."""
    with pytest.raises(InputError, match="save_pretrained"):
        trainer(whole(llama())).workload()


@pytest.mark.chaos
@pytest.mark.usefixtures("models_are_there")
@pytest.mark.processes
def test_a_job_goes_on_from_its_checkpoint_cut_elsewhere(tmp_path: Path) -> None:
    first = trainer(gpt2(), checkpoints=Checkpoints(directory=tmp_path)).fit(iterations=2)
    again = Checkpoints(directory=tmp_path, resume="newest")
    second = trainer(gpt2(), checkpoints=again, planning=Planning(partition="1,4")).fit(iterations=6)
    assert first.losses + second.losses == undisturbed("gpt2").losses
    assert second.parameters_sha256 == undisturbed("gpt2").parameters_sha256


@pytest.mark.usefixtures("models_are_there")
@pytest.mark.chaos
@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["mixtral, balanced", at_length("gemma3"), at_length("qwen3 with experts"), at_length("bf16")]
)
def test_other_models_survive_too(name: str, tmp_path: Path) -> None:
    """Mixtral's experts are apart in files. The parameters of the last are all bf16."""
    model: Any = gpt2(dtype="bfloat16") if name == "bf16" else whole(CONFIGS[name]())
    calm = trainer(model, data=language_models.batch).fit(iterations=3)
    hurt = trainer(model, data=language_models.batch, faults=Faults(kill=["W0_0@1:I1"])).fit(iterations=3)
    assert (hurt.losses, hurt.parameters_sha256) == (calm.losses, calm.parameters_sha256)
    hurt.save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    state = read.state_dict()
    assert (read.dtype == torch.bfloat16) == (name == "bf16")
    for k in range(LAST + 1):
        assert all(torch.equal(value, state[name]) for name, value in hurt.state_dict(k).items())


@pytest.mark.usefixtures("models_are_there")
@pytest.mark.chaos
@pytest.mark.processes
def test_what_is_frozen_stays_as_it_is_tied_or_not() -> None:
    model = whole(gpt2())
    frozen = [model.get_input_embeddings().weight, *model.get_submodule("transformer.h.1").parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    result = trainer(model).fit(iterations=2)
    before = model.state_dict()
    after = {name: value for k in range(LAST + 1) for name, value in result.state_dict(k).items()}
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert changed == trained and 0 < len(trained) < len(after)


@pytest.mark.timeout(600)
@pytest.mark.chaos
@pytest.mark.processes
def test_the_example_survives_its_kill(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "openrecycle.agent.examples.hugging_face_gpt2"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT / '.src'}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    first, _, last, *_ = done.stdout.split()
    assert float(last) < float(first) - 1 and done.stdout.split()[-1] == "W1_1"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2-trained").config.n_layer == 4


def test_the_example_is_short() -> None:
    text = (ROOT / "agent/examples/hugging_face_gpt2.py").read_text().partition('"""\n\n')[2]
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 15


# -- memory ------------------------------------------------------------------------------------

_GROWTH = """
import contextlib, sys
from pathlib import Path
from openrecycle.agent.models.hugging_face import pretrained

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

with contextlib.ExitStack() as files:
    source = pretrained(sys.argv[1], files)
    source(source.layer_count - 1, source.layer_count)  # what is loaded once
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    layer = source(int(sys.argv[2]), source.layer_count)
    print(peak() - before, len(list(layer.parameters())))
"""


@pytest.mark.chaos
@pytest.mark.processes
def test_a_layer_takes_its_own_memory_not_the_models(tmp_path: Path) -> None:
    """Of 130 MB on disk, in several files, a block of 13 MB."""
    large = llama(hidden_size=512, intermediate_size=1536, num_hidden_layers=10)
    transformers.AutoModelForCausalLM.from_config(large).save_pretrained(tmp_path, max_shard_size="50MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    done = subprocess.run(
        [sys.executable, "-c", _GROWTH, str(tmp_path), "4"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT / '.src'}:{ROOT}"},
    )
    kilobytes, parameters = map(int, done.stdout.split()[-2:])
    assert parameters == 9
    assert 10_000 < kilobytes < 40_000, done.stdout


def test_layers_outlive_the_files_they_were_read_from(tmp_path: Path) -> None:
    model = whole(llama())
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    before = file.read_bytes()
    with cut(str(tmp_path)) as source:
        layer = source(1, LAST + 1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.0)
    assert file.read_bytes() == before
    file.write_bytes(b"")
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())


# -- data --------------------------------------------------------------------------------------


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<pad>": 0} | {f"w{k}": k for k in range(1, VOCABULARY)}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), pad_token="<pad>")


def test_transformers_own_collator_and_its_padding() -> None:
    collator = transformers.DataCollatorForLanguageModeling(_tokenizer(), mlm=False, pad_to_multiple_of=16)
    workload = trainer(llama(), data=Data(Words(padded=True), batch_size=4, collate=collator)).workload()
    ids, padding = workload.inputs(0, 0, 0, 0)
    labels = workload.targets(0, 0, 0, 0)
    assert ids.shape == padding.shape == labels.shape == (4, 16)
    assert torch.equal(labels == -100, ids == 0) and torch.equal(padding == 1, ids == 0)


@pytest.mark.usefixtures("models_are_there")
@pytest.mark.processes
@pytest.mark.parametrize("name", [at_length("gpt2"), at_length("mixtral, balanced")])
def test_batches_may_be_of_several_lengths(name: str) -> None:
    """Bitwise as where the model is not cut. What routers say is of (samples * tokens)."""
    pad = PadCollate((8, TOKENS), {"input_ids": 0, "attention_mask": 0, "labels": -100})
    changes = {"data": Data(Texts(), batch_size=2, collate=pad)}
    uncut = trainer(CONFIGS[name](), **changes, job=Job.uniform(2, 1, 3)).fit(iterations=3)
    hurt = trainer(CONFIGS[name](), **changes, job=Job.uniform(2, 2, 3), faults=Faults(kill=["W1_1@1:I1"])).fit(
        iterations=3
    )
    assert hurt.losses == uncut.losses
    for k in range(LAST + 1):
        mine, theirs = hurt.state_dict(k), uncut.state_dict(k)
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    workload = trainer(CONFIGS[name](), **changes).workload()
    assert {workload.inputs(0, 0, p, m)[0].shape[1] for p in range(2) for m in range(3)} == {8, TOKENS}


class Texts:
    """Of four to twelve tokens."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [1 + (7 * index + k) % (VOCABULARY - 1) for k in range(4 + index * 5 % (TOKENS - 3))]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}


def test_labels_of_the_data_are_taken_as_they_are() -> None:
    data = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, k % 9], "length": 4} for k in range(64)]
    workload = trainer(llama(), data=of_four(data)).workload()
    assert (workload.targets(0, 0, 0, 0)[:, :2] == -100).all() and (workload.targets(0, 0, 0, 0)[:, 2] == 3).all()


def test_a_loss_is_the_mean_over_the_tokens_that_count() -> None:
    data = [{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, -100, 4, -100]} for _ in range(64)]
    workload = trainer(llama(), data=of_four(data)).workload()
    logits = torch.randn(4, 5, VOCABULARY)
    expected = nn.functional.cross_entropy(logits[:, 2], torch.full((4,), 4))
    torch.testing.assert_close(workload.loss(logits, workload.targets(0, 0, 0, 0)), expected)


def _ids(value: Any) -> list[dict[str, Any]]:
    return [{"input_ids": value} for _ in range(64)]


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (lambda: transformers.OPTConfig(), {}, ["model: got 'OPTForCausalLM'", "GPT-2, Llama"]),
        (lambda: transformers.Gemma3Config(), {}, ["model: got 'Gemma3ForConditionalGeneration'"]),
        (lambda: transformers.BertConfig(is_decoder=True), {}, ["model: got 'BertLMHeadModel'"]),
        (lambda: transformers.OPTConfig, {}, ["model: got 'type'"]),
        (lambda: "no/such/folder", {}, ["model: got 'no/such/folder'"]),
        (llama, {"job": "2x2"}, ["job: got 'str'"]),
        (llama, {"job": Job.uniform(1, 9, 2)}, ["job.stages: got 9,"]),
        (llama, {"data": of_four([[1, 2, 3]] * 64)}, ["data: got 'list'", golden("dicts-with-input-ids")]),
        (llama, {"data": 7}, ["data: got 'int'"]),
        (llama, {"data": of_four(streamed_jobs.Plain())}, ["data: got 'Plain',"]),
        (llama, {"data": of_four({"input_ids": [[1, 2]] * 64})}, ["data: got 'dict',"]),
        (llama, {"data": lambda: None}, ["data: got '<lambda>',"]),
        (
            llama,
            {"data": of_four([{"input_ids": [1] * n} for n in range(1, 65)])},
            ["data: got 'samples of different lengths'", "PadCollate(LENGTH, {'input_ids': 0})"],
        ),
        (lambda: transformers.GPT2ForTokenClassification(gpt2()), {}, ["model: got 'GPT2ForTokenClassification'"]),
        (llama, {"data": of_four([{"labels": [1]}] * 64)}, ["data: got 'samples without input_ids'"]),
        (llama, {"data": of_four(_ids([7, 4321]))}, ["data: got 'the token 4321', expected tokens below "]),
        (llama, {"data": of_four(_ids(3))}, ["data: got 'input_ids [1]'"]),
        (gpt2, {"data": of_four([{"input_ids": [1], "token_type_ids": [0]}] * 64)}, ["(token_type_ids)"]),
        (llama, {"data": of_four(Words(samples=8))}, ["data: got 8"]),
        (llama, {"data": of_four([])}, ["data: got 'no samples'"]),
        (llama, {"evaluate": Evaluation(data=iter([]))}, ["evaluate.data: got 'list_iterator'"]),
        (llama, {"evaluate": Evaluation(data=lambda: None, micro_batches=1)}, ["evaluate.data: got '<lambda>'"]),
        (llama, {"evaluate": Evaluation(data=DataLoader(Words(), batch_size=3))}, ["evaluate.data: got", "3", "4"]),
    ],
)
def test_what_is_wrong_is_said_at_once_and_by_name(
    model: Callable[[], Any], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        trainer(model(), **changes)
    for word in words:
        assert word in str(caught.value)


def test_an_unknown_argument_is_refused_before_the_model_is_read() -> None:
    with pytest.raises(TypeError, match="'batch_size'"):
        trainer("no/such/folder", batch_size=4)


def test_a_sample_with_a_token_that_the_model_does_not_know_is_left_out_where_bad_ones_are() -> None:
    """It is one that can't be read; were it only met in an op, a GPU could be used no more."""
    data = [*_ids([7, 4321])[:4], *_ids([7, 8])]
    changes: dict[str, Any] = {"data": Data(data, batch_size=4, shuffle=False)}
    with pytest.raises(InputError, match="4321"):
        trainer(llama(), **changes)
    made = trainer(llama(), **changes, faults=Faults(on_bad_sample="skip"))
    assert made.workload().inputs(0, 1, 0, 0)[0].max() == 8
    with pytest.raises(ValueError, match="4321"):
        made.workload().inputs(0, 0, 0, 0)
    with pytest.raises(InputError, match="4321"):
        trainer(llama(), data=of_four(_ids([-4321, 8])), faults=Faults(on_bad_sample="skip"))


def test_who_gives_a_model_as_layers_is_told_of_the_other_way() -> None:
    with pytest.raises(InputError, match="from_transformers"):
        modules_of(whole(llama()), "layers")


def test_a_folder_that_lacks_weights_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    whole(llama()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, file)
    with cut(str(tmp_path)) as source:
        source(1, LAST + 1)
        with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            source(2, LAST + 1)
    file.unlink()
    with pytest.raises(InputError, match="safetensors"):
        trainer(str(tmp_path))


def test_other_jobs_have_nothing_to_save_for_transformers(tmp_path: Path) -> None:
    result = TrainingResult((), (), "", {}.__getitem__)
    with pytest.raises(InputError, match="from_transformers"):
        result.save_pretrained(tmp_path)


def test_without_transformers_the_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "openrecycle.agent.models.hugging_face")
    with pytest.raises(InputError, match=re.escape(golden("pip-install-openrecycle-transformers"))):
        ResilientTrainer.from_transformers(
            "gpt2", data=Data([], batch_size=1), optimizer=print, job=Job.uniform(1, 1, 1)
        )


def test_transformers_is_imported_only_by_who_asks_for_it() -> None:
    users = [
        file for file in (ROOT / "agent").rglob("*.py") if re.search(r"(from|import) transformers", file.read_text())
    ]
    assert sorted(file.name for file in users) == ["hugging_face.py", "hugging_face_gpt2.py"]


def test_batches_of_a_function_and_of_samples_are_one() -> None:
    from openrecycle.agent.models.hugging_face import TokenBatches

    columns = frozenset({"input_ids", "labels"})
    ids = torch.tensor([[1, 2]])
    by_function = TokenBatches(lambda *_: {"input_ids": ids}, columns)(0, 0, 0)
    by_samples = TokenBatches(lambda samples: {"input_ids": torch.tensor([samples[0]["input_ids"]])}, columns)(
        [{"input_ids": [1, 2], "other": 3}]
    )
    assert torch.equal(by_function[0][0], by_samples[0][0]) and torch.equal(by_function[1], by_samples[1])
    with pytest.raises(ZeroDivisionError):  # what a function itself raises is no mistake about lengths
        TokenBatches(lambda *_: 1 / 0, columns)(0, 0, 0)
