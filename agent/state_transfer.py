"""A stage's state from one worker to another: over the epoch's own groups, checksummed.

Nothing is pickled: a JSON header and raw bytes, in messages of known size.
"""

from __future__ import annotations

import torch

from agent.communicator import Groups
from agent.optimizer import StageOptimizer
from agent.state import StateError
from agent.transport.group import TransferError
from planner.job import Worker

_TAG = 2**30
# A header of a model with 100,000 tensors is 10 MB; nothing that calls itself larger is one.
MAX_HEADER_BYTES = 2**28


class StateTransferError(TransferError):
    """What arrived is damaged or of another stage; the sentence says from whom it came."""


def send_state(groups: Groups, optimizer: StageOptimizer, to: Worker) -> None:
    """Blocks until `to` has it all. Raises TransferError."""
    header, body = optimizer.dump()
    sizes = torch.tensor([len(header), body.numel()], dtype=torch.int64)
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for pending in [groups.send(to, tensor, _TAG) for tensor in (sizes, text, body)]:
        pending.wait()


def receive_state(groups: Groups, optimizer: StageOptimizer, source: Worker) -> None:
    """Blocks until `optimizer` holds what `source` sent.

    Raises TransferError; StateTransferError, with nothing changed, when what arrived can't be used: the
    next try should ask another peer.
    """
    sizes = groups.receive(source, torch.zeros(2, dtype=torch.int64), _TAG).wait()
    header_size, body_size = (int(n) for n in sizes)
    if not 0 < header_size <= MAX_HEADER_BYTES or body_size < 0:
        raise StateTransferError(f"the state from {source} claims a header of {header_size} bytes")
    text = groups.receive(source, torch.empty(header_size, dtype=torch.uint8), _TAG).wait()
    body = groups.receive(source, torch.empty(body_size, dtype=torch.uint8), _TAG).wait()
    try:
        optimizer.load(bytes(text.tolist()), body)
    except StateError as error:
        raise StateTransferError(f"the state from {source} can't be used: {error}") from None
