"""What each package may import: arrows between the rooms of the house go one way only."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.golden import walk

pytestmark = pytest.mark.xdist_group("import walls")  # each file is parsed once

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"planner", "agent", "db", "app"}
# Of which other rooms each may import what.
MAY: dict[str, tuple[str, ...]] = {
    "planner": (),
    "agent": ("planner",),
    "db": ("planner",),
    "app": ("planner", "db", "agent.messages.protocol", "agent.coordination"),
}
# Heavy packages, and where alone they are imported.
ONLY_IN = {
    "torch": ("agent/",),
    "streamlit": ("app/ui/", "app/server.py"),
    "sqlalchemy": ("db/", "app/"),
    "fastapi": ("app/",),
}
WITHOUT_TORCH = (
    "agent/messages/protocol.py",
    "agent/coordination/",
    "agent/messages/client.py",
    "agent/monitoring/heartbeat.py",
)
# The state machine that launchers and consoles share does nothing but decide: no files, sockets, threads or clock.
PURE = "agent/coordination"
PURE_MAY = ("planner", "agent.coordination", "agent.messages.protocol")
DEEPEST = 8  # floors of app by files, of planner and agent by folders
PURE_STANDARD = {"__future__", "collections", "dataclasses", "enum", "functools", "math", "sys", "typing"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imports(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Of a file, wherever they stand; with: for type checkers alone?"""
    found: list[tuple[ast.Import | ast.ImportFrom, bool]] = []

    def look(node: ast.AST, typing: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append((node, typing))
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):  # in expressions there is none
            only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and block == "body"
            inner = getattr(node, block, ())
            for statement in inner if isinstance(inner, list) else ():
                look(statement, typing or only)

    look(tree_of(path), False)
    return found


@cache
def imported(path: Path, *, types: bool = True) -> tuple[str, ...]:
    """Modules by their full names. types: those too that are imported for type checkers alone."""
    found: list[str] = []
    for node, typing in imports(path):
        if typing and not types:
            continue
        if isinstance(node, ast.Import):
            found += (alias.name.removeprefix("openrecycle.") for alias in node.names)
        else:
            assert node.level == 0, f"{path}: imports are absolute"
            module = str(node.module).removeprefix("openrecycle.")
            found += (module, *(f"{module}.{alias.name}" for alias in node.names))
    return tuple(found)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_what_it_may(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    wrong = []
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        for module in imported(path):
            first = module.partition(".")[0]
            elsewhere = first in ROOMS - {room} and not within(module, MAY[room])
            heavy = first in ONLY_IN and not name.startswith(ONLY_IN[first])
            if elsewhere or heavy or (first == "torch" and name.startswith(WITHOUT_TORCH)):
                wrong.append(f"{name} imports {module}")
    assert not wrong


def test_who_decides_does_nothing_else() -> None:
    """`local.py` drives the machine in a launcher, and has plans made beside it."""
    files = [path for path in sorted((ROOT / PURE).rglob("*.py")) if path.name != "local.py"]
    assert files
    found = [
        f"{path.name} imports {module}"
        for path in files
        for module in imported(path, types=False)
        if module.partition(".")[0] not in PURE_STANDARD and not within(module, PURE_MAY)
    ]
    assert not found


def arrows_between(rooms: set[str], *, types: bool) -> dict[str, set[str]]:
    """Which modules of these rooms each of theirs imports; imports inside of functions too."""
    files = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): path
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
    }
    return {own: {m for m in imported(path, types=types) if m in files and m != own} for own, path in files.items()}


def feature(module: str) -> str:
    """The folder that a module stands in, however deep; itself, if that is the room."""
    path = Path(*module.split("."))
    folder = path if any((ROOT / path).glob("*.py")) else path.parent  # an older checkout leaves folders of caches
    return module if len(folder.parts) == 1 else ".".join(folder.parts)


def arrows_between_features(room: str, *, types: bool) -> dict[str, set[str]]:
    arrows: dict[str, set[str]] = {}
    for module, below in arrows_between({room}, types=types).items():
        own = feature(module)
        arrows.setdefault(own, set()).update({feature(other) for other in below} - {own})
    return arrows


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_the_folders_of_a_room_import_each_other_in_no_circle(room: str) -> None:
    """A feature is a folder, also one in a folder, or a file of the room. Imports for type checkers count."""
    arrows = arrows_between_features(room, types=True)
    assert sum(map(len, arrows.values())) > 2
    try:
        tuple(TopologicalSorter(arrows).static_order())
    except CycleError as circle:
        pytest.fail(" <- ".join(circle.args[1]))


def longest_chain(arrows: dict[str, set[str]]) -> list[str]:
    """What a reader has to know before, from the lowest floor up."""
    chains: dict[str, list[str]] = {}
    for module in TopologicalSorter(arrows).static_order():
        chains[module] = [*max((chains[below] for below in arrows[module]), key=len, default=[]), module]
    return max(chains.values(), key=len)


def test_no_room_of_the_console_lies_deep() -> None:
    longest = longest_chain(arrows_between({"app"}, types=True))
    assert 3 < len(longest) <= DEEPEST, " <- ".join(longest)


def test_the_root_of_the_console_holds_entry_points_only() -> None:
    """Whatever a folder imports is a feature, and stands in one."""
    arrows = arrows_between_features("app", types=True)
    folders = {own for own in arrows if (ROOT / own.replace(".", "/")).is_dir()} - {"app"}
    assert len(folders) > 5
    found = {other for own in folders for other in arrows[own] - folders}
    assert not found


@pytest.mark.parametrize("room", ["planner", "agent"])
def test_no_folder_lies_deep(room: str) -> None:
    longest = longest_chain(arrows_between_features(room, types=False))
    assert 3 < len(longest) <= DEEPEST, " <- ".join(longest)


def test_modules_import_each_other_in_no_circle() -> None:
    """In the whole house; imports for type checkers count."""
    arrows = arrows_between(ROOMS, types=True)
    assert sum(map(len, arrows.values())) > len(arrows)
    try:
        tuple(TopologicalSorter(arrows).static_order())
    except CycleError as circle:
        pytest.fail(" <- ".join(circle.args[1]))


def test_settings_know_no_feature() -> None:
    found = {module for module in imported(ROOT / "app" / "runtime" / "settings.py") if within(module, ("app",))}
    assert all(within(module, ("app.runtime",)) for module in found), found


@dataclass(frozen=True)
class NamesOfFile:
    """classes: that it defines. made: functions, classes, and what is given a value, of an object too. asked: names of
    attributes that begin with an underscore, which it reads, by getattr too. doc: its docstring."""

    classes: list[str]
    made: set[str]
    asked: set[str]
    doc: str


@cache
def names_by_file() -> dict[Path, NamesOfFile]:
    """Of all of the product."""
    out = {}
    for path in sorted(path for room in (*ROOMS, ".src") for path in (ROOT / room).rglob("*.py")):
        tree = tree_of(path)
        out[path] = names = NamesOfFile([], set(), set(), str(ast.get_docstring(tree)))
        for node in walk(tree):
            asked = ""
            if isinstance(node, ast.ClassDef):
                names.classes.append(node.name)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.made.add(node.name)
            elif isinstance(node, ast.Attribute):
                asked = node.attr
                if isinstance(node.ctx, ast.Store):
                    names.made.add(asked)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.made.add(node.id)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                asked = str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ""
            if re.match("_[a-z]", asked):
                names.asked.add(asked)
    return out


def test_a_class_name_says_which_class_it_is() -> None:
    """No two in the house have the same, or one that differs by an underscore. Examples that show the same model have
    the same name."""
    where: dict[str, list[str]] = {}
    for path, names in names_by_file().items():
        if (ROOT / "agent" / "examples") not in path.parents:
            for name in names.classes:
                where.setdefault(name.lstrip("_"), []).append(path.relative_to(ROOT).as_posix())
    assert len(where) > 500
    assert not {name: files for name, files in where.items() if len(files) > 1}


def test_private_names_of_others_are_listed() -> None:
    """In the two files that say for which version each is known to work, and when it is no longer needed. Of the
    house's own, a file may read those of itself and of what it imports: what it inherits."""
    named = names_by_file()
    documented = {"_replace", "_make", "_asdict", "_fields", "_exit"}  # of namedtuple and os
    modules = {
        path.relative_to(ROOT).with_suffix("").as_posix().removeprefix(".src/").replace("/", "."): path
        for path in named
    }
    users = set()
    for module, path in modules.items():
        near = (path, *(modules[name] for name in imported(path) if name in modules))
        others = named[path].asked.difference(documented, *(named[one].made for one in near))
        if others and ROOT / "agent" / "examples" not in path.parents:
            users.add(module)
    lists = "app.runtime.patches", "agent.models.compat"
    said = "\n".join(named[ROOT / f"{name.replace('.', '/')}.py"].doc for name in lists)
    assert len(users) > 5
    assert not {user for user in users if user not in lists and user not in said}
