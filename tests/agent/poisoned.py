"""The example's model, whose data raises: `--workload tests.agent.poisoned:Poisoned`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from openrecycle.agent.examples.gpt import Gpt

Place = Sequence[int]
"""(iteration, pipeline, micro-batch)."""


class Poisoned(Gpt):
    """inputs, targets: of which the first stage's, or the last one's, raise whenever they are read. exits: of which the
    last one's would end Python. ragged: of which
    the first stage's are shorter than the others. broken: the first
    process that reads the first stage's data of this iteration or a later one fails at it from then on, as with a bad
    disk; its process number is in the file `mark`. prints: so many characters are printed with each micro-batch.
    named: so many samples are in each, whose numbers are long."""

    def __init__(
        self,
        inputs: Sequence[Place] = (),
        targets: Sequence[Place] = (),
        exits: Sequence[Place] = (),
        ragged: Sequence[Place] = (),
        broken: int | None = None,
        mark: str = "",
        prints: int = 0,
        named: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._bad_inputs, self._bad_targets = {tuple(p) for p in inputs}, {tuple(p) for p in targets}
        self._ragged, self._exits = {tuple(p) for p in ragged}, {tuple(p) for p in exits}
        self._broken, self._mark, self._prints, self._named = broken, Path(mark), prints, named

    def samples(self, iteration: int, pipeline: int, micro_batch: int) -> list[int]:
        return [10**4000] * self._named

    def inputs(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        if self._prints:
            print("." * self._prints)
        if (iteration, pipeline, micro_batch) in self._bad_inputs:
            raise ValueError(f"a damaged picture at {iteration}, {pipeline}, {micro_batch}")
        if self._broken is not None and iteration >= self._broken and self._is_broken():
            raise OSError("input/output error")
        inputs = super().inputs(seed, iteration, pipeline, micro_batch)
        return inputs[:, 1:] if (iteration, pipeline, micro_batch) in self._ragged else inputs

    def targets(self, seed: int, iteration: int, pipeline: int, micro_batch: int) -> Tensor:
        if (iteration, pipeline, micro_batch) in self._bad_targets:
            file = os.fsdecode(b"caf\xe9.txt")  # in an encoding that is not UTF-8
            raise ValueError(f"a label out of range at {iteration}, {pipeline}, {micro_batch} in {file}")
        if (iteration, pipeline, micro_batch) in self._exits:
            sys.exit("no such file")
        return super().targets(seed, iteration, pipeline, micro_batch)

    def _is_broken(self) -> bool:
        try:
            with self._mark.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return self._mark.read_text() == str(os.getpid())
        return True
