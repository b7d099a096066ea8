"""The stage's own step, its snapshot and its roll-back; and the stage's state as bytes.

A stage steps when *its* gradients are reduced, without waiting for the other stages. When a death
interrupts the iteration elsewhere, some stages have stepped and others have not; the ones that have
go back. One snapshot is enough: see agent.recovery.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from agent.gradients import GradientSum

_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16,
                                                     torch.int64, torch.int32, torch.uint8, torch.bool)}  # fmt: skip


class NonFiniteError(RuntimeError):
    """A gradient of the iteration was NaN, infinite or out of range."""


class StateError(RuntimeError):
    """A state received from a peer is damaged or does not belong to this stage."""


class StageOptimizer:
    """Module and optimizer of one stage on one worker, and how many steps they have taken.

    committed: number of iterations whose step has been taken (so also the next iteration).
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, gradients: GradientSum) -> None:
        self.module = module
        self.optimizer = optimizer
        self.gradients = gradients
        self.committed = 0
        self._snapshot: list[tuple[nn.Parameter, Tensor, dict[str, Any]]] | None = None

    def step(self) -> float:
        """Takes the step on the reduced gradients; returns the (scaled) loss that came with them.

        Raises NonFiniteError, with nothing changed, when a term had to be rejected.
        """
        if self.gradients.rejected:
            raise NonFiniteError(
                f"iteration {self.committed}: {self.gradients.rejected} gradients were NaN, infinite or "
                f"out of range; lower the learning rate or check the data"
            )
        loss = self.gradients.loss
        self._snapshot = [
            (p, p.detach().clone(), {k: _copy(v) for k, v in self.optimizer.state.get(p, {}).items()})
            for p in self._parameters()
        ]
        self.gradients.write_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.gradients.clear()
        self.committed += 1
        return loss

    def roll_back(self) -> None:
        """Undoes the last step. Raises StateError when there is none to undo."""
        if self._snapshot is None:
            raise StateError(f"no snapshot to roll back from {self.committed} committed iterations")
        with torch.no_grad():
            for parameter, value, state in self._snapshot:
                parameter.copy_(value)
                if state:
                    self.optimizer.state[parameter] = state
                else:
                    self.optimizer.state.pop(parameter, None)
        self._snapshot = None
        self.committed -= 1

    # -- state as bytes: for a peer that re-joins, and for the fingerprint --------------------

    def parameters_sha256(self) -> str:
        """Of all parameters' bytes, in the module's order."""
        digest = hashlib.sha256()
        for parameter in self._parameters():
            digest.update(_bytes(parameter.detach()))
        return digest.hexdigest()

    def dump(self) -> tuple[bytes, Tensor]:
        """(header, body): a JSON header and one uint8 tensor with parameters, buffers and optimizer state."""
        entries: list[dict[str, Any]] = []
        parts: list[Tensor] = []

        def put(kind: str, index: int, key: str, value: Any) -> None:
            entry: dict[str, Any] = {"kind": kind, "index": index, "key": key}
            if isinstance(value, Tensor):
                entry |= {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
                parts.append(_raw(value.detach()))
            else:
                entry["value"] = value
            entries.append(entry)

        for i, parameter in enumerate(self._parameters()):
            put("parameter", i, "", parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                put("state", i, key, value)
        for i, buffer in enumerate(self.module.buffers()):
            put("buffer", i, "", buffer)
        body = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)
        header = {"committed": self.committed, "sha256": hashlib.sha256(_bytes(body)).hexdigest(), "entries": entries}
        return json.dumps(header).encode(), body

    def load(self, header: bytes, body: Tensor) -> None:
        """Takes over what a peer dumped. Raises StateError when it is damaged or of another stage."""
        try:
            doc = json.loads(header)
            entries, committed = doc["entries"], int(doc["committed"])
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"unreadable header: {error}") from None
        if hashlib.sha256(_bytes(body)).hexdigest() != doc["sha256"]:
            raise StateError("the checksum does not match")
        parameters, buffers = self._parameters(), list(self.module.buffers())
        offset = 0
        self.optimizer.state.clear()
        with torch.no_grad():
            for entry in entries:
                value: Any = entry.get("value")
                if "dtype" in entry:
                    dtype = _DTYPES[entry["dtype"]]
                    size = dtype.itemsize * _numel(entry["shape"])
                    value = body[offset : offset + size].clone().view(dtype).view(entry["shape"])
                    offset += size
                if entry["kind"] == "state":
                    self.optimizer.state[parameters[entry["index"]]][entry["key"]] = value
                    continue
                target = (parameters if entry["kind"] == "parameter" else buffers)[entry["index"]]
                if target.shape != value.shape or target.dtype != value.dtype:
                    raise StateError(
                        f"{entry['kind']} {entry['index']}: shape {tuple(value.shape)} is of another model"
                    )
                target.copy_(value)
        self.committed = committed
        self._snapshot = None

    def _parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's own memory, without a copy and without numpy (which the agent does not need)."""
    raw = _raw(tensor)
    if not raw.numel():
        return memoryview(b"")
    view = (ctypes.c_ubyte * raw.numel()).from_address(raw.data_ptr())
    view._keep = raw  # type: ignore[attr-defined]  # the memory lives as long as the view
    return memoryview(view).cast("B")


def _numel(shape: list[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
