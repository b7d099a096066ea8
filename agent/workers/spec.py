"""What the processes of a job are started with, as plain data. Another node gets it as plain JSON, so nothing has to be
unpickled."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from openrecycle import planner
from openrecycle.agent.checkpoints import Origin
from openrecycle.agent.config.options import LOOPBACK, TrainingOptions
from openrecycle.agent.messages.protocol import NamedWorker
from openrecycle.agent.models.data import own_numbers
from openrecycle.agent.models.layers import Partition, StageIO
from openrecycle.agent.models.workload import NamedWorkload, Workload, WorkloadSource
from openrecycle.planner.jobs.errors import InputError
from openrecycle.planner.layers.room import LayerRoom
from openrecycle.planner.plans.plan import read_json

T = TypeVar("T")

# -- what the processes of a job are started with; plain data -----------------------------------


def by_name(workload: WorkloadSource) -> NamedWorkload:
    """Returns `workload`. Raises InputError if it has no name by which another host could find it."""
    if not isinstance(workload, NamedWorkload):
        raise InputError("--workload", type(workload).__name__, "module:factory in a job on several nodes")
    return workload


def _told(workload: WorkloadSource) -> dict[str, str]:
    # The options are one text: pydantic would make null of a number that is not finite, and a list of a set.
    named = by_name(workload)
    return {"path": named.path, "options": json.dumps(dict(named.options))}


def _named(document: Any) -> NamedWorkload:
    try:
        return NamedWorkload(document["path"], read_json(document["options"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no workload: {error!r}") from None


_Source = Annotated[WorkloadSource, PlainValidator(_named), PlainSerializer(_told)]
"""A workload that another node can be told of, which needs a name."""


@dataclass(frozen=True)
class RunSpec:
    """What is the same for all workers: the options, and what was derived from them before the start.

    partition: layers per stage; (): even. layer_io: what passes between layers; None: each worker finds out. origin: of
    the job's checkpoints; None: it writes none. heartbeat_seconds: how often a console hears of each worker; None:
    there is no console. shared_gpus: workers share GPUs. divided: micro-batches are divided over the ranks of a worker
    (agent.models.parallelized.parts_of_a_rank). room: the memory for layers that move.
    """

    options: TrainingOptions
    workload: _Source
    partition: Partition = ()
    layer_io: StageIO | None = None
    origin: Origin | None = None
    heartbeat_seconds: float | None = None
    shared_gpus: bool = False
    divided: bool = False
    room: LayerRoom | None = None

    def load_workload(self) -> Workload:
        """Makes a new, untrained workload, which is the same each time, even if making it draws random numbers without
        a seed. Raises InputError when it can't be made."""
        with own_numbers("workload", self.options.seed):
            return self.workload.load()


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a worker process needs to know.

    joins: it replaces a dead worker and takes its state from a peer of its stage. address: of its host, as peers reach
    it. node: the number of its launcher. slot: see agent.launcher.processes. rank: which of the worker's `ranks` it is.
    meeting: a file where the ranks find each other. The last three are set when the process is started.
    """

    worker: NamedWorker
    incarnation: str
    run: RunSpec
    joins: bool = False
    threads: int = 1
    address: str = LOOPBACK
    node: int = 0
    slot: int = 0
    rank: int = 0
    meeting: str = ""

    @property
    def ranks(self) -> int:
        return self.run.options.platform.ranks_per_worker

    @property
    def on_gpu(self) -> bool:
        return self.run.options.platform.device == "cuda"


# -- what a node is told of a worker to start ---------------------------------------------------


def source_of(*folders: Path) -> str:
    """Returns a hash of the program's code, which says which version is there: its version number changes rarely."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            name = file.relative_to(folder)
            # Editors leave files with such names beside the code, some of them as broken links.
            if any(part.startswith(".") for part in name.parts) or not file.is_file():
                continue
            code = file.read_bytes()
            digest.update(f"{name.as_posix()} {len(code)}\n".encode() + code)
    return digest.hexdigest()[:12]


# What must be the same on all nodes, since it shows in the bits.
MACHINE = {
    "openrecycle": source_of(Path(__file__).parents[1], Path(planner.__file__).parent),
    "torch": torch.__version__,
    "python": platform.python_version(),
    "instruction set": torch.backends.cpu.get_cpu_capability(),
}
WORKLOAD = "workload"
"""The name of the workload's code in what `same_on_all` adds to it."""


def same_on_all(workload: WorkloadSource) -> dict[str, str]:
    """Returns what must be the same on all nodes of a job: MACHINE, the code of the workload, and the versions of the
    packages that it imports. Nodes with other data or other activations would train on together, each as its own
    script says."""
    code = ", ".join(f"{module} {code_of(module)}".strip() for module in workload.modules)
    return MACHINE | {WORKLOAD: code, "packages": ", ".join(packages_of(*workload.modules))}


def code_of(module: str) -> str:
    """Returns a hash of a module's code, of the packages that it is in, and of all that it imports from the folder
    where it lies, without what pip has put there; of an installed one, without what it imports. It imports nothing
    itself. "": there is no such code, or it is this program's own."""
    files, _ = _read_from(module)
    digest = hashlib.sha256()
    for name, code in sorted(files.items()):
        if code:
            digest.update(f"{name} {len(code)}\n".encode() + code)
    return digest.hexdigest()[:12] if files else ""


def packages_of(*modules: str) -> list[str]:
    """Returns the installed packages, each with its version, that the code of these modules imports (see `code_of`), or
    that they are in; without torch and this program."""
    names = {name for module in modules for name in _read_from(module)[1]} - {"torch", _OWN}
    known = packages_distributions() if names else {}
    packages = {package for name in names for package in known.get(name, ()) if package}
    return [f"{package} {version(package)}" for package in sorted(packages)]


_OWN = __name__.partition(".")[0]


def _read_from(module: str) -> tuple[dict[str, bytes], set[str]]:
    """Returns the code that `code_of` hashes, by module, and the names of packages from elsewhere that it imports."""
    top = module.partition(".")[0]
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return {}, set()
    if found is None or found.origin is None or top == _OWN:
        return {}, set()
    package = found.submodule_search_locations is not None
    folder = Path(found.origin).parents[1 if package else 0]
    others = _installed_in(folder)  # `pip install --target` may have put torch beside a script
    installed = folder.name in ("site-packages", "dist-packages") or top in others
    files, left, elsewhere = dict[str, bytes](), [module], {top} if installed else set[str]()
    while left:
        name = left.pop()
        begin = name.partition(".")[0]
        if name in files or name in sys.stdlib_module_names:
            continue
        if begin in others and begin != top:
            elsewhere.add(begin)
            continue
        path = folder.joinpath(*name.split("."))
        file, files[name] = _read_first(path / "__init__.py", path.parent / f"{path.name}.py")
        left += [name.rpartition(".")[0]] if "." in name else []
        if file is None and name == begin:
            elsewhere.add(name)
        if file is not None and not installed:
            left += _imports(files[name], name if file.name == "__init__.py" else name.rpartition(".")[0])
    return files, elsewhere


def _installed_in(folder: Path) -> set[str]:
    """Returns the names of the modules that pip has put into this folder."""
    found = set[str]()
    for record in folder.glob("*.dist-info/RECORD"):
        with suppress(OSError):
            lines = record.read_text(errors="replace").splitlines()
            found |= {line.partition(",")[0].partition("/")[0].removesuffix(".py") for line in lines}
    return found


def _read_first(*files: Path) -> tuple[Path | None, bytes]:
    """Returns the first of these files that is there, and what is in it. One that must not be read is none, as a folder
    of another user that has the name of an installed package."""
    for file in files:
        with suppress(OSError):
            return file, file.read_bytes()
    return None, b""


def _imports(code: bytes, package: str) -> Iterator[str]:
    """Yields the names of modules that this code of a module in `package` may import."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: it is nested too deeply
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            if base := ".".join([*above, *([node.module] if node.module else [])]):
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


_RUN, _WORKER = TypeAdapter(RunSpec), TypeAdapter(WorkerSpec)
_OF_A_NODE = {"slot", "rank", "meeting"}


def encode_spec(spec: WorkerSpec) -> dict[str, Any]:
    """Returns a worker's spec as JSON, without what the node that starts the process adds."""
    document: dict[str, Any] = _WORKER.dump_python(spec, mode="json", exclude=_OF_A_NODE)
    return document


def encode_run(run: RunSpec) -> dict[str, Any]:
    document: dict[str, Any] = _RUN.dump_python(run, mode="json")
    return document


def decode_spec(document: Mapping[str, Any]) -> WorkerSpec:
    """Reads what `encode_spec` has written. Raises ValueError for any other document."""
    decode_run(document.get("run", {}))
    return _read(_WORKER, document, _fields(WorkerSpec) - _OF_A_NODE)


def decode_run(document: Mapping[str, Any]) -> RunSpec:
    """Reads what `encode_run` has written. Raises ValueError for any other document."""
    return _read(_RUN, document, _fields(RunSpec))


def _fields(kind: type[RunSpec] | type[WorkerSpec]) -> set[str]:
    return {field.name for field in fields(kind)}


def _read(form: TypeAdapter[T], document: Any, told: set[str]) -> T:
    # With a default in the place of a missing field it would be another job.
    if missing := told - set(document):
        raise ValueError(f"no worker can be started from this: it lacks {', '.join(sorted(missing))}")
    try:
        return form.validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"no worker can be started from this: {place}: {first['msg']}") from None
