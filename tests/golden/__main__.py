"""`python -m tests.golden`: moves the sentences that tests quote in asserts and parameters into wording.json."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.golden import FILE, ROOT, quoted, wording, write


def _name(sentence: str, names: dict[str, str]) -> str:
    words = re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)*", re.sub(r"\{\d+\}|['\\]", "", sentence).lower())
    for count in range(min(5, len(words)), len(words) + 1):
        name = "-".join(words[:count])
        if names.get(name, sentence) == sentence:
            return name
    return next(n for k in range(2, 99) if names.get(n := f"{'-'.join(words)}-{k}", sentence) == sentence)


def _template(node: ast.Constant | ast.JoinedStr, source: str) -> tuple[str, list[str]]:
    """The sentence as the file has it, and the source of its values."""
    if isinstance(node, ast.Constant):
        return str(node.value), []
    text, values = "", []
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value).replace("{", "{{").replace("}", "}}")
            continue
        assert isinstance(part, ast.FormattedValue)
        plain = part.conversion == -1 and part.format_spec is None
        value = ast.unparse(part.value) if plain else ast.unparse(ast.JoinedStr([part]))
        text += f"{{{len(values)}}}"
        values.append(value)
    return text, values


def move(path: Path, names: dict[str, str]) -> int:
    """Returns how many."""
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    found = sorted(quoted(source), key=lambda n: (n.lineno, n.col_offset), reverse=True)
    for node in found:
        text, values = _template(node, source)
        name = _name(text, names)
        names[name] = text
        call = f"golden({', '.join([chr(34) + name + chr(34), *values])})"
        assert node.end_lineno is not None and node.end_col_offset is not None
        first, last = node.lineno - 1, node.end_lineno - 1
        before = lines[first].encode()[: node.col_offset].decode()
        after = lines[last].encode()[node.end_col_offset :].decode()
        lines[first : last + 1] = [before + call + after]
    if found:
        text = "".join(lines)
        if "from tests.golden import golden" not in text:
            imports = list(re.finditer(r"^(?:from|import) [^\n]*(?:\([^)]*\))?\n", text, re.M))
            at = max(m.end() for m in imports if m.start() < text.index("\ndef ") + 1)
            text = text[:at] + "from tests.golden import golden\n" + text[at:]
        path.write_text(text)
    return len(found)


def main() -> int:
    names = wording() if FILE.exists() else {}
    moved = {p: n for p in sorted((ROOT / "tests").rglob("*.py")) if (n := move(p, names))}
    write(names)
    changed = [str(p) for p in moved]
    if changed:
        for command in (("check", "--select", "I", "--fix"), ("format",)):
            subprocess.run([sys.executable, "-m", "ruff", *command, "-q", *changed], check=False)
    print(f"{sum(moved.values())} sentences of {len(moved)} files moved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
