"""Causal language models of transformers, cut into layers: the embedding, one layer per block, and the head.

A layer is the model itself without everything that belongs to other layers, so its parameters keep the names that they
have in the whole model. Blocks need more than hidden states (masks, rotary positions). This file does not compute that
itself: it runs the model's own forward with a gate in place of each block, which notes what the block would be given.
So this works for every model whose blocks follow each other, with its own attention, sliding windows and scaling.
Other models are refused.

A worker builds only the layers of its stage: the skeleton of the model takes no memory, and of the files only the
tensors of these layers are read.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from openrecycle.agent.models import compat
from openrecycle.agent.models.data import (
    Data,
    Evaluation,
    check_data_function,
    is_function,
    own_numbers,
    pad_to,
)
from openrecycle.agent.models.layers import StageIO, TensorSpec, Tied
from openrecycle.agent.models.state import dtype_name
from openrecycle.agent.models.workload import first_readable
from openrecycle.planner.jobs.errors import InputError, in_a_line
from openrecycle.scratch import scratch

try:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
except ImportError as error:
    raise InputError(
        "model", f"no transformers that can be imported ({error})", "pip install '<clone of OpenReCycle>[transformers]'"
    ) from None

FAMILIES = "GPT-2, Llama, Mistral, Mixtral, OLMo 1 and 2, Phi 3, Pythia, Qwen 2 and 3, Gemma 1 to 3"
"""The tested model families."""
PASSED = ("attention_mask", "position_ids")
"""What a batch may have that every block needs. It is passed from layer to layer."""


# -- what a model is made from -----------------------------------------------------------------


@dataclass(frozen=True)
class Pretrained:
    """Builds the layers of a model; it is sent to workers. folder: with the weights; None: the model initialises
    itself. frozen: names of parameters that are not trained. checkpointing: with activation checkpointing. passed:
    which of PASSED the batches have. generation: the model's GenerationConfig, to be saved with it."""

    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    dtype: torch.dtype
    folder: str | None = None
    frozen: frozenset[str] = frozenset()
    checkpointing: bool = False
    passed: tuple[str, ...] = ()
    generation: GenerationConfig | None = None

    @property
    def layer_count(self) -> int:
        return len(self.cut.blocks) + 2

    @cached_property
    def cut(self) -> Cut:
        """How the model is cut. Found out once in each process."""
        # Own numbers, so that the numbers drawn for a layer do not depend on whether this came before or after. The
        # caller may be building layers without memory; but the few numbers that show how to cut the model must be real.
        with own_numbers("cut"), torch.device("cpu"):
            with torch.device("meta"):
                model = self.kind._from_config(  # type: ignore[no-untyped-call]
                    copy.deepcopy(self.config), dtype=self.dtype
                )
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in self.frozen)
            if self.checkpointing:
                model.gradient_checkpointing_enable()
            return Cut.of(model)

    @property
    def tied(self) -> Tied:
        """The parameters that the first and the last layer share."""
        last = self.layer_count - 1
        return tuple((f"0.{source}", f"{last}.{name}") for name, source in self.cut.tied.items())

    def stage_io(self, shape: torch.Size) -> StageIO:
        """Describes what passes from layer to layer, for input_ids of this shape."""
        hidden = TensorSpec((*shape, self.cut.model.config.hidden_size), dtype_name(self.dtype))
        passed = (TensorSpec(tuple(shape), "int64", gradient=False),) * len(self.passed)
        # Gradients travel from the first trained layer on.
        trained = any(p.requires_grad for p in self.cut.part(0, self.passed).parameters())
        samples, length = shape
        out, logits = [(replace(hidden, gradient=trained), *passed)], tuple[TensorSpec, ...]()
        for block in self.cut.blocks:
            trained = trained or any(p.requires_grad for p in block.parameters())
            logits += tuple(
                TensorSpec((samples * length, router.get_parameter("weight").shape[0]), hidden.dtype, trained)
                for router in self.cut.routers(block)
            )
            out.append((replace(hidden, gradient=trained), *passed, *logits))
        return tuple(out)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "cut"}

    def __call__(self, layer: int, layers: int) -> nn.Module:
        """Builds a layer. Its tied parameters get their values later, from the first layer (layers.build_layers)."""
        cut = self.cut
        if torch.empty(0).device.type == "meta":
            return cut.part(layer, self.passed).train()
        given: dict[str, Any] = {"config": cut.model.config, "dtype": self.dtype, "output_loading_info": True}
        # An empty state dict makes transformers initialise all parameters.
        none: dict[str, Any] = {"state_dict": {}}
        given |= none if self.folder is None else {"use_safetensors": True, "local_files_only": True}
        with _quiet():
            part, found = _part_class(self.kind).from_pretrained(self.folder, cut, layer, self.passed, **given)
        missing = set(found["missing_keys"]) - set(cut.tied)
        if self.folder is not None and missing:
            raise InputError("model", self.folder, f"a folder with all weights; it lacks {', '.join(sorted(missing))}")
        if found["mismatched_keys"]:
            raise InputError("model", self.folder, f"weights of the config's shapes, unlike {found['mismatched_keys']}")
        for name, parameter in part.named_parameters():  # transformers has made new ones
            parameter.requires_grad_(cut.tied.get(name, name) not in self.frozen)
        for tensor in (*part.parameters(), *part.buffers()) if self.folder is not None else ():
            # They are mapped files, which may change or go away, and begin at odd addresses. Kernels, and so roundings,
            # are chosen by the address.
            tensor.data = tensor.data.clone()
        trained: nn.Module = part.train()
        return trained

    def save(self, weights: Callable[[int], Mapping[str, Any]], folder: str | Path) -> None:
        """Writes a folder that `from_pretrained` reads. weights: returns the state dict of a layer."""
        model = copy.copy(self.cut.model)
        model.generation_config = self.generation or model.generation_config
        state = {name: tensor for k in range(self.layer_count) for name, tensor in weights(k).items()}
        with _quiet():
            model.save_pretrained(folder, state_dict={n: t for n, t in state.items() if n not in self.cut.tied})


def pretrained(model: Any, into: contextlib.ExitStack) -> Pretrained:
    """Makes a Pretrained of a config, a folder, a name on the hub, or a model. into: a model's weights are written to a
    folder that exists until `into` is closed. Raises InputError."""
    if isinstance(model, PreTrainedModel):
        _check(model.config)
        if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
            expected = f"a causal language model, such as {FAMILIES}; this one has no head that tells tokens"
            raise InputError("model", type(model).__name__, expected)
        written = into.enter_context(tempfile.TemporaryDirectory(prefix="model-", dir=scratch()))
        with _quiet():
            model.save_pretrained(written)
        return Pretrained(
            type(model),
            model.config,
            model.dtype,
            written,
            frozenset(name for name, p in model.named_parameters() if not p.requires_grad),
            any(getattr(part, "gradient_checkpointing", False) for part in model.modules()),
            generation=getattr(model, "generation_config", None),
        )
    folder: str | None = None
    generation: GenerationConfig | None = None
    if isinstance(model, (str, Path)):
        folder = _folder(str(model))
        try:
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            expected = f"a folder with a config.json ({in_a_line(error)[:200]})"
            raise InputError("model", str(model), expected) from None
        with contextlib.suppress(OSError):
            generation = GenerationConfig.from_pretrained(folder)
    else:
        config = model
    if not isinstance(config, PreTrainedConfig):
        expected = "a transformers config, model, folder of one, or name on the hub"
        raise InputError("model", type(model).__name__, expected)
    _check(config)
    dtype = getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype or torch.float32
    try:
        with torch.device("meta"):
            auto: Any = AutoModelForCausalLM
            kind = type(auto.from_config(copy.deepcopy(config), dtype=dtype))
    except ValueError:
        raise InputError("model", config.model_type, f"a causal language model, such as {FAMILIES}") from None
    return Pretrained(kind, config, dtype, folder, generation=generation)


def _check(config: PreTrainedConfig) -> None:
    """Raises InputError for quantized weights."""
    if getattr(config, "quantization_config", None) is not None:
        raise InputError("model", "quantized weights", "weights that can be trained")


def _folder(name: str) -> str:
    """Returns the folder of the model's files. From the hub they are loaded here once, and not by every worker. Raises
    InputError."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
        except Exception as error:  # errors of the hub, and of whatever library sends its requests
            raise InputError("model", name, f"a folder, or a name on the hub ({in_a_line(error)})") from None
    if not any(folder.glob("*.safetensors")):
        raise InputError("model", name, "a folder with .safetensors files, as save_pretrained writes it")
    return str(folder.resolve())


# -- what it is trained on ---------------------------------------------------------------------


class TokenError(ValueError):
    """A sample has a token for which the model has no embedding."""

    def __init__(self, token: int, below: int) -> None:
        super().__init__(f"the token {token}, and the model has embeddings for those from 0 to {below - 1}")
        self.token, self.below = token, below


@dataclass(frozen=True)
class TokenBatches:
    """Makes (inputs, labels) of batches, which are dicts as transformers' collators make them. Serves as a `collate`,
    or as a data function.

    make: makes a batch of samples, or of (iteration, pipeline, micro_batch). columns: the arguments of the model's
    forward; other entries of samples are dropped, as transformers' own Trainer does. several: is a single argument a
    list of samples? pads: the PadCollate that pads the batches, if there is one. below: the number of tokens that the
    model knows; None: tokens are not checked.
    """

    make: Callable[..., Any]
    columns: frozenset[str]
    several: bool = True
    pads: Any = None
    below: int | None = None

    def __call__(self, *args: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        batch = self.batch(*args)
        ids = batch["input_ids"]
        mask = batch.get("attention_mask")
        labels = batch.get("labels")
        if labels is None:
            labels = ids if mask is None else ids.masked_fill(mask == 0, _IGNORED)
        passed = {name: batch[name].long() for name in PASSED if name in batch}
        return (ids, *(_passed_on(name, value) for name, value in passed.items())), labels

    @property
    def varies(self) -> bool:
        return bool(getattr(self.pads, "varies", False))

    def widest(self, made: tuple[tuple[Tensor, ...], Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Pads what `__call__` has made further, to the largest length."""
        inputs, labels = made
        length = self.pads.lengths[-1]
        return tuple(pad_to(t, length, 0) for t in inputs), pad_to(labels, length, _IGNORED)

    def batch(self, *args: Any) -> dict[str, Tensor]:
        """Returns a checked batch. Raises InputError, and TokenError for a token that the model does not know: a GPU
        would report such a token only when it can no longer be used."""
        if len(args) == 1 and self.several:
            args = ([self._sample(sample) for sample in args[0]],)
        try:
            made = self.make(*args)
        except InputError:
            raise
        except Exception as error:
            samples = args[0] if len(args) == 1 and self.several else []
            if len({_length(sample.get("input_ids")) for sample in samples}) < 2:
                raise
            padded = {name: value for name, value in _PADDING.items() if name in samples[0]}
            expected = f"one length: Data(collate=PadCollate(LENGTH, {padded}))"
            raise InputError("data", "samples of different lengths", expected) from error
        expected = f"dicts with input_ids, and labels, {' and '.join(PASSED)} where there are any"
        if not isinstance(made, Mapping):
            raise InputError("data", type(made).__name__, expected)
        found = {name: value for name, value in made.items() if value is not None}
        if "input_ids" not in found:
            raise InputError("data", "samples without input_ids", expected)
        if other := found.keys() - {"input_ids", "labels", *PASSED}:
            raise InputError("data", f"a batch with {', '.join(found)}", f"{expected} ({', '.join(sorted(other))})")
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.shape != found["input_ids"].shape or value.dim() != 2:
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise InputError("data", f"{name} {got}", "tensors of (samples, tokens), all of one shape")
        self.check(found["input_ids"])
        return found

    def check(self, ids: Tensor) -> None:
        """Raises TokenError for a token that the model does not know."""
        if self.below is not None and ids.numel():
            least, largest = (int(token) for token in ids.aminmax())
            if least < 0 or largest >= self.below:
                raise TokenError(largest if least >= 0 else least, self.below)

    def _sample(self, sample: Any) -> Any:
        if not isinstance(sample, Mapping):
            raise InputError("data", type(sample).__name__, "samples that are dicts with input_ids")
        return {name: value for name, value in sample.items() if name in self.columns}


_IGNORED = -100
"""A label that is ignored."""
_PADDING = {"input_ids": 0, "attention_mask": 0, "labels": _IGNORED}


def _length(tokens: Any) -> int | None:
    return len(tokens) if hasattr(tokens, "__len__") else None


def predicted(labels: Tensor) -> Tensor:
    """Returns how many tokens of a batch are predicted; the first of each sample is not."""
    return (labels[:, 1:] != _IGNORED).sum()


@dataclass(frozen=True)
class TokenLoss:
    """The model's own loss, which shifts the labels by one: the mean over the tokens of a micro-batch. balance: the
    weight of the routers' loss, which the last layer returns beside the logits."""

    function: Callable[..., Tensor]
    vocabulary: int
    balance: float | None = None

    def __call__(self, output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        logits, routers = output if isinstance(output, tuple) else (output, None)
        loss = self.function(logits, labels, self.vocabulary)
        return loss if routers is None or self.balance is None else loss + self.balance * routers


def pretrained_job(
    model: Any,
    data: Data,
    into: contextlib.ExitStack,
    evaluate: Evaluation | None = None,
    *,
    skips: bool = False,
) -> tuple[Pretrained, TokenLoss, Data, Evaluation | None]:
    """Returns the layers, the loss, and the data to train and to evaluate on. data: without a DataLoader. skips: are
    bad samples skipped? Raises InputError."""
    source = pretrained(model, into)
    columns = frozenset(inspect.signature(source.kind.forward).parameters) | {"labels"}
    samples, by_function = data.samples, is_function(data.samples)
    if by_function:
        tokens = TokenBatches(samples, columns, pads=data.collate)
    else:
        collate = transformers.default_data_collator if data.collate is default_collate else data.collate
        tokens = TokenBatches(collate, columns, pads=collate)
        columns_alone = isinstance(samples, Mapping) and 0 not in samples
        if isinstance(samples, IterableDataset) or columns_alone or not hasattr(samples, "__getitem__"):
            expected = (
                "a map-style data set (or a list) of dicts with input_ids, or a function of (iteration, pipeline, "
                "micro_batch)"
            )
            raise InputError("data", type(samples).__name__, expected)

        if hasattr(samples, "__len__") and not len(samples):
            raise InputError("data", "no samples", "at least those of one iteration")

    def first(tokens: TokenBatches) -> dict[str, Tensor]:
        if by_function:
            return first_readable(tokens.batch)
        return first_readable(lambda i, *_: tokens.batch([samples[i]]))

    batch = first(tokens)
    if isinstance(evaluate, Evaluation) and isinstance(evaluate.data, DataLoader):
        own = evaluate.without_loader(data.batch_size)
        if own.collate not in (data.collate, tokens.make, tokens.pads, default_collate):
            expected = "a DataLoader with the collator of the training data, or its data set alone"
            raise InputError("evaluate.data", "a DataLoader with another collator", expected)
        evaluate = replace(evaluate, data=own.samples)
    elif isinstance(evaluate, Evaluation) and is_function(evaluate.data):
        check_data_function(evaluate.data, "evaluate.data", ["number"])
        evaluate = replace(evaluate, data=TokenBatches(evaluate.data, columns, several=False))
    source = replace(source, passed=tuple(name for name in PASSED if name in batch))
    whole = source.cut.model
    embedding: Any = whole.get_input_embeddings()
    checked = replace(tokens, below=embedding.num_embeddings)
    try:
        if skips:
            first(checked)  # raises unless some sample can be used
        else:
            checked.check(batch["input_ids"])
    except TokenError as error:
        expected = f"tokens below {error.below}, for which the model has embeddings"
        raise InputError("data", f"the token {error.token}", expected) from None
    if tokens.varies or not by_function:
        data = replace(data, collate=checked)
    data = replace(data, samples=checked if by_function else samples, weight=data.weight or predicted)
    with _quiet():  # for GPT-2, whose name does not say which loss it has, this would log a line
        balance: Any = whole.router_aux_loss_coef if source.cut.router is not None else None
        loss = TokenLoss(whole.loss_function, whole.config.vocab_size, balance)
    return source, loss, data, evaluate


# -- how a model is cut ------------------------------------------------------------------------


class PassThrough(nn.Module):
    """Stands in place of a module. Returns `instead`, or its first argument. notes: keep its arguments in `given`."""

    def __init__(self, instead: Tensor | None = None, *, notes: bool = False) -> None:
        super().__init__()
        self.instead, self.notes = instead, notes
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.notes:
            self.given = args, kwargs
        if self.instead is not None:
            return self.instead
        # A module before the blocks may get indices, and its output is added to something: so that gets a zero.
        floating = args and isinstance(args[0], Tensor) and args[0].is_floating_point()
        return args[0] if floating else torch.zeros(())


@dataclass(frozen=True)
class Cut:
    """How a model without memory is cut. base: the name of the part that has the blocks, and holder: of its child that
    lists them. before, after: the names of the base's modules that run before and after the blocks, in order. tied:
    maps the head's parameters that are shared to those they are shared with, by name. router: if the loss balances the
    experts, the class of the routers, and which of their outputs are the logits."""

    model: PreTrainedModel
    base: str
    holder: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    router: tuple[type[nn.Module], int] | None = None

    def routers(self, block: nn.Module) -> list[nn.Module]:
        """Returns the routers in a block whose logits the loss needs."""
        kind = None if self.router is None else self.router[0]
        return [] if kind is None else [part for part in block.modules() if isinstance(part, kind)]

    @property
    def blocks(self) -> Sequence[nn.Module]:
        blocks: Sequence[nn.Module] = getattr(getattr(self.model, self.base), self.holder)
        return blocks

    @classmethod
    def of(cls, model: PreTrainedModel) -> Cut:
        """Finds out how to cut a model. Raises InputError if its blocks do not simply follow each other."""
        for part in (*model.modules(), *model.parameters(), *model.buffers()):
            part.__dict__.pop("_is_hf_initialized", None)  # nothing that has no memory is initialized
        prefix, count = model.base_model_prefix, getattr(model.config, "num_hidden_layers", None)
        base: nn.Module = getattr(model, prefix, None) or nn.Module()
        lists = [name for name, part in base.named_children() if isinstance(part, nn.ModuleList) and len(part) == count]
        if len(lists) != 1:
            raise _uncuttable(model, f"{len(lists)} lists of {count} blocks in its {prefix or 'body'}")
        others = [n for n, c in base.named_children() if n != lists[0] and any(True for _ in c.parameters())]
        try:
            before, after = _order(base, lists[0], others)
        except Exception as error:
            raise _uncuttable(model, in_a_line(error)[:200]) from error
        tied = dict(model.all_tied_weights_keys)
        names = [name.removeprefix(f"{prefix}.") for name, _ in model.named_parameters(remove_duplicate=False)]
        outside = [name for name in names if "." not in name]
        if outside or not all(source.startswith(f"{prefix}.") for source in tied.values()):
            raise _uncuttable(model, f"parameters of its own ({outside}), or tied ones ({tied})")
        router = None
        if getattr(model.config, "output_router_logits", False):
            said: Any = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits")
            if getattr(said, "target_class", None) is None or not hasattr(model, "router_aux_loss_coef"):
                raise _uncuttable(model, "output_router_logits, and it does not say where its routers are")
            router = said.target_class, said.index
        return cls(model, prefix, lists[0], before, after, tied, router)

    def part(self, layer: int, passed: tuple[str, ...]) -> nn.Module:
        part: nn.Module = _part_class(type(self.model))(self.model.config, self, layer, passed)
        return part

    def fill(self, part: PreTrainedModel, layer: int) -> tuple[nn.Module, PassThrough, nn.Module | None]:
        """Makes `part` the given layer. Returns the body whose forward is to run; the gate that stands for the layer's
        block, or for the last block; and the block, if the layer has one."""
        part.__dict__.update(compat.without_children(self.model).__dict__)
        part.all_tied_weights_keys = {}
        whole = getattr(self.model, self.base)
        base, number = compat.without_children(whole), layer - 1
        gates = [PassThrough(notes=k == number) for k in range(len(self.blocks))]
        head = number == len(gates)
        kept = self.before if layer == 0 else self.after if head else ()
        children = dict[str, nn.Module]()
        for name, child in whole.named_children():
            if name in (*self.before, *self.after) and name not in kept:
                children[name] = PassThrough()
            elif name != self.holder:
                # Dropout draws random numbers, which only the layer that it belongs to may do.
                elsewhere = layer and name not in self.after and isinstance(child, nn.Dropout)
                children[name] = nn.Identity() if elsewhere else copy.deepcopy(child)
        for name, child in children.items():
            base.add_module(name, child)
        if head:
            for name, child in self.model.named_children():
                part.add_module(name, base if name == self.base else copy.deepcopy(child))
        else:
            part.add_module(self.base, base)
        if layer == 0 or head:
            base.add_module(self.holder, nn.ModuleList(gates))
            return base, gates[-1], None
        # Not in the part's own tree, where the block has its place: this body only finds out what the block is given.
        notes = compat.without_children(whole)
        for name, child in children.items():
            notes.add_module(name, child)
        notes.add_module(self.holder, nn.ModuleList(gates))
        block = copy.deepcopy(self.blocks[number])
        place = nn.ModuleList()
        place.add_module(str(number), block)
        base.add_module(self.holder, place)
        return notes, gates[number], block


def _uncuttable(model: PreTrainedModel, reason: str) -> InputError:
    return InputError("model", type(model).__name__, f"one that can be cut into blocks, such as {FAMILIES} ({reason})")


def _order(whole: nn.Module, name: str, others: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns which of `others` come before the blocks, and which after. Runs the body, without its parameters, on a
    few numbers. Raises ValueError if a block is not given what the block before it returns."""
    config: Any = whole.config
    generator = torch.Generator(device="cpu").manual_seed(0)
    hidden = [torch.randn(1, 2, config.hidden_size, generator=generator, device="cpu") for _ in getattr(whole, name)]
    base = compat.without_children(whole)
    for child_name, child in whole.named_children():
        if child_name == name:
            base.add_module(name, nn.ModuleList(PassThrough(each, notes=True) for each in hidden))
        elif child_name in others:
            base.add_module(child_name, PassThrough())
        else:
            base.add_module(child_name, _real(copy.deepcopy(child), whole))
    called: list[str] = []
    for child_name, child in base.named_children():
        child.register_forward_pre_hook(lambda *_, n=child_name: called.append(n))
    gates = list(getattr(base, name))
    gates[-1].register_forward_pre_hook(lambda *_: called.append(name))
    with torch.no_grad(), torch.device("cpu"):
        out = base(inputs_embeds=torch.zeros_like(hidden[0]), use_cache=False).last_hidden_state
    for k, gate in enumerate(gates):
        if gate.given is None or (k and gate.given[0][0] is not hidden[k - 1]):
            raise ValueError(f"block {k} is not given what block {k - 1} gives")
    end = called.index(name)
    plain = [n for n in called[end + 1 :] if n not in others]
    if plain:  # OLMo's last norm has no parameters
        return _order(whole, name, [*others, *plain])
    after = tuple(n for n in called[end + 1 :] if n in others)
    before = tuple(n for n in others if n not in after)
    if not torch.equal(out, hidden[-1]):
        raise ValueError("what comes after the blocks is more than its modules")
    return before, after


def _real(module: nn.Module, owner: Any) -> nn.Module:
    """Gives a module that has no parameters its real values, on the CPU."""
    module.to_empty(device="cpu")
    for part in module.modules():
        owner._init_weights(part)
    return module


_PARTS: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def _part_class(kind: type[PreTrainedModel]) -> Any:
    """Returns a subclass of the model's class whose instances are single layers."""
    if kind not in _PARTS:
        # transformers looks up by the class's name how the weights in files become its parameters.
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _PARTS[kind] = type(kind.__name__, (_ModelLayer, kind), names)
    return _PARTS[kind]


class _ModelLayer(nn.Module):
    """One layer. It takes (input_ids or hidden states, *passed, *routers' logits), and returns the same for the next
    layer. The last layer returns logits, and the routers' loss where that counts."""

    def __init__(self, config: PreTrainedConfig, cut: Cut, layer: int, passed: tuple[str, ...]) -> None:
        nn.Module.__init__(self)
        run = cut.fill(self, layer)  # type: ignore[arg-type]
        # In a tuple, so that modules that have their place elsewhere in the tree do not become children, too.
        self._run = (*run, layer == 0, layer == len(cut.blocks) + 1)
        self._passed, self._router = passed, cut.router

    def forward(self, x: Tensor, *passed: Tensor) -> Any:
        base, gate, block, first, last = self._run
        given = {name: _passed_on(name, value) for name, value in zip(self._passed, passed, strict=False)}
        if block is not None:
            with torch.no_grad():
                base(inputs_embeds=x, use_cache=False, **given)
            assert gate.given is not None
            ((_, *args), kwargs), gate.given = gate.given, None
            with _routers_of(block, self._router) as logits:
                y = block(x, *args, **kwargs)
            y = y[0] if isinstance(y, tuple) else y
            passed += tuple(each.to(y.dtype) for each in logits)
        elif first:
            y = base(input_ids=x, use_cache=False, **given).last_hidden_state
        elif last:
            gate.instead = x
            with _given_routers(base, passed[len(self._passed) :]):
                out = super().forward(inputs_embeds=x, use_cache=False, **given)
            gate.instead = None
            return out.logits if self._router is None else (out.logits, out.aux_loss)
        return (y, *passed) if passed else y


@contextlib.contextmanager
def _routers_of(block: nn.Module, router: tuple[type[nn.Module], int] | None) -> Iterator[list[Tensor]]:
    """Yields a list, to which the logits of the block's routers are added as they run inside the context."""
    found: list[Tensor] = []
    kind, index = router or ((), 0)
    routers = [part for part in block.modules() if isinstance(part, kind)]
    handles = [part.register_forward_hook(lambda _, __, out: found.append(out[index])) for part in routers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _given_routers(base: nn.Module, logits: tuple[Tensor, ...]) -> Iterator[None]:
    """Puts these logits into the body's output inside the context, since the blocks have run elsewhere."""

    def add(_: nn.Module, __: Any, out: Any) -> None:
        if logits:
            out["router_logits"] = logits

    handle = base.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _passed_on(name: str, value: Tensor) -> Tensor:
    """Converts a tensor between the form that the model takes and the one that travels. They differ for a mask, which
    travels as 1 for padding: then the zeros that stages are tried with are a valid mask."""
    return 1 - value if name == "attention_mask" else value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Switches off transformers' progress bars and reports, which are about a whole model."""
    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
