"""What checkpoints hold, whoever wrote which share."""

from __future__ import annotations

from pathlib import Path

from openrecycle.agent.checkpoints import whole_checkpoints
from openrecycle.agent.models.state import StageState, pack


def checkpoint_bits(folder: Path) -> dict[int, bytes]:
    """Of each that is whole, its iteration and a header with a checksum of everything."""
    found = {}
    for checkpoint in whole_checkpoints(folder):
        checkpoint.verify()
        state = checkpoint.load(range(sum(checkpoint.partition)))
        tensors = {name: state.tensors[name] for name in sorted(state.tensors)}
        found[checkpoint.iteration] = pack(StageState(state.document, tensors))[0]
    return found
