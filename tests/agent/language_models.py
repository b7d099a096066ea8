"""Small language models of transformers, one of each family, and texts to train them on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrecycle import Data, Job
from openrecycle.agent.jobs.trainer import ResilientTrainer
from openrecycle.agent.models.workload import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class _Package:
    """transformers, which is imported when something of it is asked for: each process of pytest reads all files, and
    this is 0.7 s of CPU."""

    def __getattr__(self, name: str) -> Any:
        import transformers

        return getattr(transformers, name)


transformers = _Package()

VOCABULARY, TOKENS, BLOCKS = 61, 12, 3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_NARROW: dict[str, Any] = _SIZES | {"head_dim": 8}
_WINDOWS: dict[str, Any] = _NARROW | {"sliding_window": 4}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def gpt2(**changes: Any) -> PreTrainedConfig:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": BLOCKS, "n_head": 4, "n_positions": 16}
    return transformers.GPT2Config(**(sizes | {"bos_token_id": 1, "eos_token_id": 1} | changes))


def llama(**changes: Any) -> PreTrainedConfig:
    return transformers.LlamaConfig(**(_SIZES | changes))


# Made when one is used: transformers loads a class when it is named, and all of them take 4 s.
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: gpt2(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0),
    "llama": llama,
    "llama with eager attention": lambda: llama(attn_implementation="eager", tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**_WINDOWS),
    "olmo": lambda: transformers.OlmoConfig(**_SIZES),
    "olmo2": lambda: transformers.Olmo2Config(**_SIZES),
    "phi3": lambda: transformers.Phi3Config(**_SIZES),
    "pythia": lambda: transformers.GPTNeoXConfig(
        **{name: size for name, size in _SIZES.items() if name != "num_key_value_heads"}
    ),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**_NARROW),
    "gemma": lambda: transformers.GemmaConfig(**_NARROW),
    "gemma2": lambda: transformers.Gemma2Config(**_WINDOWS, layer_types=_MIXED),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_WINDOWS, layer_types=_MIXED),
    "mixtral": lambda: transformers.MixtralConfig(**_NARROW, num_local_experts=4),
    "mixtral, balanced": lambda: transformers.MixtralConfig(
        **_NARROW, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5
    ),
    "qwen2 with experts": lambda: transformers.Qwen2MoeConfig(**_SIZES, shared_expert_intermediate_size=16, **_EXPERTS),
    "qwen3 with experts": lambda: transformers.Qwen3MoeConfig(**_NARROW, **_EXPERTS),
}

adamw = partial(torch.optim.AdamW, lr=3e-3)
of_four = partial(Data, batch_size=4)


class Words:
    """A map-style data set: dicts of lists, with a column that no model takes. padded: with an attention mask."""

    def __init__(self, *, padded: bool = False, samples: int = 128) -> None:
        self.padded, self.samples = padded, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [1 + (7 * index + k) % (VOCABULARY - 1) for k in range(TOKENS)]
        if not self.padded:
            return {"input_ids": ids, "text": "seven"}
        length = 5 + index % (TOKENS - 4)
        rest = TOKENS - length
        return {"input_ids": ids[:length] + [0] * rest, "attention_mask": [1] * length + [0] * rest, "text": "seven"}


def batch(iteration: int, pipeline: int, micro_batch: int) -> dict[str, Tensor]:
    """A data function."""
    ids = torch.randint(1, VOCABULARY, (4, TOKENS))
    return {"input_ids": ids, "labels": ids.clone()}


def trainer(model: Any, **changes: Any) -> ResilientTrainer:
    arguments: dict[str, Any] = {"data": of_four(Words()), "optimizer": adamw, "job": Job.uniform(2, 2, 3)}
    return ResilientTrainer.from_transformers(model, **(arguments | changes))


def workload() -> Workload:
    """What `openrecycle train --workload` takes."""
    return trainer(llama()).workload()
