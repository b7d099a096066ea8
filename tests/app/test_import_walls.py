"""What each package may import: arrows between the rooms of the house go one way only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"planner", "agent", "db", "app"}
# Of which other rooms each may import what.
MAY: dict[str, tuple[str, ...]] = {
    "planner": (),
    "agent": ("planner",),
    "db": ("planner",),
    "app": ("planner", "db", "agent.protocol", "agent.blame"),
}
# Heavy packages, and where alone they are imported.
ONLY_IN = {
    "torch": ("agent/",),
    "streamlit": ("app/ui/", "app/server.py"),
    "sqlalchemy": ("db/", "app/"),
    "fastapi": ("app/",),
}
WITHOUT_TORCH = ("agent/protocol.py", "agent/blame.py", "agent/client.py", "agent/heartbeat.py")


def imported(path: Path) -> Iterator[str]:
    """Modules by their full names; of `from x import y` both x and x.y."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("openrecycle.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield str(node.module).removeprefix("openrecycle.")


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
            if elsewhere or heavy or (first == "torch" and name in WITHOUT_TORCH):
                wrong.append(f"{name} imports {module}")
    assert not wrong
