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
    "app": ("planner", "db", "agent.messages.protocol", "agent.coordination", "agent.config.options"),
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
    "agent/config/options.py",
    "agent/coordination/",
    "agent/messages/client.py",
    "agent/monitoring/heartbeat.py",
)
# The state machine that launchers and consoles share does nothing but decide: no files, sockets, threads or clock.
PURE = "agent/coordination"
PURE_MAY = ("planner", "agent.coordination", "agent.messages.protocol")
# Of each room, how many of its files the longest chain of imports passes through. The goal is 8 for all.
FLOORS = {"app": 8, "db": 5, "planner": 11, "agent": 14}
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


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_no_room_grows_deeper(room: str) -> None:
    """One measure for all rooms: files, and imports that only a type checker follows do not count."""
    longest = longest_chain(arrows_between({room}, types=False))
    assert 3 < len(longest) <= FLOORS[room], " <- ".join(longest)


def test_the_root_of_the_console_holds_entry_points_only() -> None:
    """Whatever a folder imports is a feature, and stands in one."""
    arrows = arrows_between_features("app", types=True)
    folders = {own for own in arrows if (ROOT / own.replace(".", "/")).is_dir()} - {"app"}
    assert len(folders) > 5
    found = {other for own in folders for other in arrows[own] - folders}
    assert not found


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
    attributes that begin with an underscore, which it reads, by getattr too, or imports from others. changed: what it
    changes of others for the whole process, by full names; what ends with a dot is changed under some name. doc: its
    docstring."""

    classes: list[str]
    made: set[str]
    asked: set[str]
    changed: set[str]
    doc: str


# Functions, by full names, that change how the whole process works. Some of these modules only ask.
PROCESS_WIDE = re.compile(
    r"gc\.(?!collect$|enable$|get_|is_)|sys\.set|sys\.\w*hook$|resource\.setrlimit|\w+\.mallopt$|faulthandler\."
)
# Options of torch that are given by setting them.
OPTIONS_OF_TORCH = "torch.backends.", "torch.utils.deterministic."


def others_names(path: Path) -> dict[str, str]:
    """By the names that a file imports from others, the full ones."""
    found: dict[str, str] = {}
    for node, _ in imports(path):
        before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            if not (before or alias.name).startswith("openrecycle"):
                name = alias.name if before or alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = before + name
    return found


def full_name(node: ast.AST, others: dict[str, str]) -> str:
    """Of an attribute of what others have; "" of all else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    whose = others.get(node.id, "") if isinstance(node, ast.Name) else ""
    return ".".join([whose, *reversed(parts)]) if whose and parts else ""


def changed_by(node: ast.AST, others: dict[str, str]) -> str:
    """What of others the node changes: by giving an attribute a value, by setattr or vars, or by calling or handing on
    a function that does so."""
    if isinstance(node, ast.Attribute):
        name = full_name(node, others) or (f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else "")
        stored = not isinstance(node.ctx, ast.Load) and full_name(node, others)
        return name if stored or (name and PROCESS_WIDE.match(name)) else ""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        name = others.get(node.id, "")
        return name if PROCESS_WIDE.match(name) else ""
    if isinstance(node, ast.Constant):  # the function of a library that is found by its name
        return "mallopt" if node.value == "mallopt" else ""
    target = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        target = node.args[0]
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "vars" and node.value.args:
            target = node.value.args[0]
        elif isinstance(node.value, ast.Attribute) and node.value.attr == "__dict__":
            target = node.value.value
        elif full_name(node.value, others) == "sys.modules":
            return "sys.modules"
    if target is None:
        return ""
    name = full_name(target, others) or (others.get(target.id, "") if isinstance(target, ast.Name) else "")
    return f"{name}." if name else ""


def names_of(path: Path) -> NamesOfFile:
    tree, others = tree_of(path), others_names(path)
    names = NamesOfFile([], set(), set(), set(), str(ast.get_docstring(tree)))
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
        if (changed := changed_by(node, others)) and not changed.startswith(OPTIONS_OF_TORCH):
            names.changed.add(changed)
    names.asked.update(name for full in others.values() for name in full.split(".") if re.match("_[a-z]", name))
    return names


@cache
def names_by_file() -> dict[Path, NamesOfFile]:
    """Of all of the product."""
    return {path: names_of(path) for room in (*ROOMS, ".src") for path in sorted((ROOT / room).rglob("*.py"))}


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


LISTS = "app.runtime.patches", "agent.models.compat"
DOCUMENTED = {"_replace", "_make", "_asdict", "_fields", "_exit"}  # of namedtuple and os
# A script of a page gives the browser's own objects another function.
CHANGED_IN_BROWSER = re.compile(
    r"\b((?:window|globalThis|document|history|navigator|location|console|[A-Z]\w*\.prototype)\.\w+)\s*=(?![=>])"
)


def listed(module: str) -> str:
    """What the lists say of a module: its entries in the first, and all of the second if that names it."""
    first, second = (names_by_file()[ROOT / f"{name.replace('.', '/')}.py"].doc for name in LISTS)
    entries = re.findall(rf"^{re.escape(module)} .*\n(?: .*\n)*", first + "\n", re.M)
    return "".join(entries) + (second if module in second else "")


def not_listed(module: str, asked: set[str], changed: set[str]) -> set[str]:
    said = listed(module)
    return {name for name in asked if name not in said} | {name for name in changed if last_two(name) not in said}


def last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def test_changes_of_the_platform_and_private_names_are_listed() -> None:
    """In the two files that say for which version each is known to work, and when it is no longer needed; each by its
    name, in the entry of the module. Of the house's own, a file may read those of itself and of what it imports: what
    it inherits."""
    named = names_by_file()
    modules = {
        path.relative_to(ROOT).with_suffix("").as_posix().removeprefix(".src/").replace("/", "."): path
        for path in named
    }
    users, missing = set(), {}
    for module, path in modules.items():
        near = (path, *(modules[name] for name in imported(path) if name in modules))
        others = named[path].asked.difference(DOCUMENTED, *(named[one].made for one in near))
        if not (others or named[path].changed) or module in LISTS or ROOT / "agent" / "examples" in path.parents:
            continue
        users.add(module)
        if left := not_listed(module, others, named[path].changed):
            missing[module] = left
    for path in (ROOT / "app").rglob("*.js"):
        name = path.relative_to(ROOT).as_posix()
        if changed := set(CHANGED_IN_BROWSER.findall(path.read_text())):
            users.add(name)
            if left := not_listed(name, set(), changed):
                missing[name] = left
    assert len(users) > 10
    assert not missing


def test_each_entry_of_the_list_says_what_when_and_why() -> None:
    text = names_by_file()[ROOT / "app" / "runtime" / "patches.py"].doc
    entries = re.findall(r"^((?:[\w./]+  +.+\n)+)((?: .*\n)+)", text, re.M)
    assert len(entries) > 15
    for heads, body in entries:
        assert "    Gives: " in body and "    Not needed " in body, heads
    for module in re.findall(r"^(\S+)  ", "".join(heads for heads, _ in entries), re.M):
        path = ROOT / (module if module.endswith(".js") else module.replace(".", "/") + ".py")
        assert path.exists() or (ROOT / ".src" / path.relative_to(ROOT)).exists(), module


@pytest.mark.parametrize(
    "code, changed",
    [
        ("import sys\nsys.stdout = None", {"sys.stdout"}),
        ("import sys\nfor name in ('stdout',): setattr(sys, name, None)", {"sys."}),
        ("import atexit, gc\natexit.register(gc.freeze)", {"gc.freeze"}),
        ("from gc import disable\ndisable()", {"gc.disable"}),
        ("import gc\ngc.collect()", set()),
        ("from multiprocessing import spawn\nspawn.prepare = None", {"multiprocessing.spawn.prepare"}),
        ("import a.b\na.b.c.d = 1", {"a.b.c.d"}),
        ("from a import B as C\nC.d = 1", {"a.B.d"}),
        ("import a as b\nvars(b)['c'] = 1", {"a."}),
        ("import ctypes\ngetattr(ctypes.CDLL(None), 'mallopt', None)", {"mallopt"}),
        ("import torch\ntorch.backends.cudnn.benchmark = False", set()),
        ("from openrecycle.app import b\nb.c = 1", set()),
    ],
)  # fmt: skip
def test_a_change_of_the_platform_is_found(code: str, changed: set[str], tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(code)
    assert names_of(path).changed == changed


def test_a_listed_module_must_list_its_next_change_too() -> None:
    assert not not_listed("app.server", {"_get_signed_cookie_with_chunks"}, {"streamlit.config._main_script_path"})
    assert not_listed("app.server", {"_other"}, {"sys.excepthook"}) == {"_other", "sys.excepthook"}
    assert not_listed("app.ui.live", set(), {"gc.disable"}), "another module's entry is no entry"
