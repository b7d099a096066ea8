"""What torch keeps for a process stays as it was, whatever the code of a model or a data set does to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from openrecycle.agent.models.compat import check_version, fp32_precision
from openrecycle.agent.models.torch_settings import TorchSettings, kept_settings
from openrecycle.agent.models.workload import NamedWorkload
from openrecycle.planner.jobs.errors import InputError
from tests.agent.local_jobs import TINY, LocalJob, fault_free_losses

CPU = torch.device("cpu")


@pytest.fixture
def settings() -> Iterator[TorchSettings]:
    kept = TorchSettings(CPU)
    yield kept
    kept.put_back()


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("torch.set_num_threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        ("torch.set_grad_enabled", lambda: torch.set_grad_enabled(False)),
        ("torch.set_default_dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("torch.set_flush_denormal", lambda: torch.set_flush_denormal(True)),
        ("torch.use_deterministic_algorithms", lambda: torch.use_deterministic_algorithms(True)),
        ("torch.set_float32_matmul_precision", lambda: torch.set_float32_matmul_precision("medium")),
        ("torch.backends.mkldnn.conv.fp32_precision", lambda: precision(torch.backends.mkldnn.conv, "bf16")),
        ("torch.backends.mkldnn.rnn.fp32_precision", lambda: precision(torch.backends.mkldnn.rnn, "bf16")),
        ("torch.backends.fp32_precision", lambda: precision(torch.backends, "tf32")),
        ("torch.backends.cuda.enable_flash_sdp", lambda: torch.backends.cuda.enable_flash_sdp(False)),
        ("torch.backends.mkldnn.enabled", lambda: torch.backends.mkldnn.set_flags(False)),
    ],
)
def test_a_change_is_named_and_taken_back(settings: TorchSettings, setting: str, change: Callable[[], object]) -> None:
    assert settings.put_back() == []
    other = TorchSettings(CPU)
    change()
    assert setting in settings.differing(settings.number, TorchSettings(CPU).number) or "threads" in setting
    changed = settings.put_back()
    assert setting in [one.setting for one in changed] and all(one.was != one.now for one in changed)
    assert settings.put_back() == other.put_back() == []
    assert TorchSettings(CPU).number == settings.number


@pytest.fixture
def kept() -> Iterator[None]:
    with kept_settings():
        yield


LEVELS = ("highest", "high", "medium")


def precisions() -> list[Any]:
    """As the public functions give them, which raise where old and new ones don't fit."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    old = [torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32, cudnn.allow_tf32]
    get, _ = fp32_precision()
    return old + [get(backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")]


@pytest.mark.parametrize("kind", ["cpu", "cuda", "launcher"])
@pytest.mark.parametrize(("base", "changed"), list(product((None, *LEVELS), LEVELS)))
def test_older_functions_give_the_precision_that_they_gave(
    kept: None, kind: str, base: str | None, changed: str
) -> None:
    if base is not None:
        torch.set_float32_matmul_precision(base)
    before = precisions()

    def change() -> None:
        torch.set_float32_matmul_precision(changed)
        torch.backends.cudnn.allow_tf32 = False

    if kind == "launcher":
        with kept_settings():
            change()
    else:
        settings = TorchSettings(torch.device(kind))
        change()
        settings.put_back()
        if kind == "cpu":  # where what cudnn does shows in nothing
            torch.backends.cudnn.allow_tf32 = True
        assert settings.put_back() == []
    assert precisions() == before


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_only_older_functions_keep_is_put_back(kept: None, kind: str) -> None:
    """Else they raise from then on, in that worker alone."""
    torch.set_float32_matmul_precision("medium")
    settings, before = TorchSettings(torch.device(kind)), precisions()
    torch.backends.cuda.matmul.allow_tf32 = True
    with pytest.raises(RuntimeError, match="legacy"):
        precisions()
    settings.put_back()
    assert precisions() == before


def test_new_functions_alone_leave_the_old_ones_alone(kept: None) -> None:
    """A precision that a backend had of the one for all is not pinned."""
    precision(torch.backends, "tf32")
    settings = TorchSettings(CPU)
    precision(torch.backends, "ieee")
    assert [one.setting for one in settings.put_back()][:1] == ["torch.backends.fp32_precision"]
    get, _ = fp32_precision()
    assert get("mkldnn", "matmul") == "tf32"
    precision(torch.backends, "none")
    assert get("mkldnn", "matmul") == "none"


def test_a_precision_that_a_layer_sets_and_takes_back_is_none_that_it_changed(kept: None) -> None:
    """None was said before, and ieee is afterwards: the same bits."""
    get, put = fp32_precision()
    put("mkldnn", "matmul", "none")
    settings, before = TorchSettings(CPU), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.set_float32_matmul_precision(before)
    assert get("mkldnn", "matmul") == "ieee"
    assert settings.number == TorchSettings(CPU).number
    assert settings.put_back() == [] and get("mkldnn", "matmul") == "none"


@pytest.mark.parametrize(
    "of", ["fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation"]
)
def test_what_products_on_a_gpu_are_allowed_is_watched(kept: None, of: str) -> None:
    settings, flags = TorchSettings(torch.device("cuda")), torch.backends.cuda.matmul
    was = getattr(flags, f"allow_{of}")
    setattr(flags, f"allow_{of}", not was)
    name = f"torch.backends.cuda.matmul.allow_{of}"
    assert settings.differing(settings.number, TorchSettings(torch.device("cuda")).number) == [name]
    assert [one.setting for one in settings.put_back()] == [name]
    assert getattr(flags, f"allow_{of}") == was


@pytest.mark.parametrize("name", ["_set_cudnn_allow_tf32", "_get_mkldnn_enabled", "_get_cudnn_sdp_enabled"])
def test_a_torch_that_can_not_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_version()
    monkeypatch.delattr(torch._C, name)
    with pytest.raises(InputError, match=name):
        check_version()


def precision(backend: object, value: str) -> None:
    setattr(backend, "fp32_precision", value)  # noqa: B010 (untyped)


@pytest.mark.processes
def test_one_that_a_data_set_changes_does_not_show_in_the_bits() -> None:
    """In one worker alone, in the middle of an iteration."""
    grid: dict[str, Any] = {"pipelines": 2, "stages": 2, "micro_batches": 2}
    workload = NamedWorkload("tests.agent.crashing:Meddling", TINY)
    job = LocalJob(**grid, iterations=3, workload=workload, kills=("W0_1@2:F0",)).run()
    assert job.losses == fault_free_losses(3, **grid)
    warnings = [line["warning"] for line in job.lines if "warning" in line]
    for setting in ("torch.set_grad_enabled", "torch.set_float32_matmul_precision"):
        assert sum(setting in text for text in warnings) == 1
