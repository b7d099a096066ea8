"""What torch keeps for a process stays as it was, whatever the code of a model or a data set does to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from openrecycle.agent.models.torch_settings import TorchSettings
from openrecycle.agent.models.workload import NamedWorkload
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
