"""The API's documentation is true: its examples run, and its reference has every operation."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import requests
from console_server import ConsoleServer, ForkedConsole

pytestmark = pytest.mark.processes

DOCS = Path(__file__).resolve().parents[2] / "app" / "docs" / "api.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    server = ForkedConsole(f"sqlite:///{tmp_path_factory.mktemp('docs') / 'console.db'}", "--api-only")
    yield server
    server.close()


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed here")
def test_the_examples_run_as_they_stand(server: ConsoleServer, tmp_path: Path) -> None:
    script = "set -eu\n" + "\n".join(re.findall(r"^```sh\n(.*?)^```$", DOCS.read_text(), re.M | re.S))
    assert script.count("curl") > 12
    environment = {"CONSOLE": server.root, "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["failed"] == ["W1_0"]
    assert '"state":"done"' in done.stdout, "the plan was waited for"
    assert '"taken":1,"refused":[{"index":1,"worker":"W0_1","code":"fenced"' in done.stdout
    assert "openrecycle_job_workers{" in done.stdout


def test_the_paths_that_it_names_exist(server: ConsoleServer) -> None:
    known = {f"/api/v1{path}" for path in server.get("/openapi.json").json()["paths"]}
    patterns = [re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in known]
    named = set(re.findall(r"/api/v1/[\w/${}.-]+", DOCS.read_text())) - {"/api/v1/docs", "/api/v1/openapi.json"}
    assert len(named) > 8
    for path in named:
        assert any(pattern.fullmatch(path) for pattern in patterns), path


def test_nothing_in_a_header_or_a_query_is_null(server: ConsoleServer) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    given = [p for operations in paths.values() for one in operations.values() for p in one.get("parameters", [])]
    assert len(given) > 100 and not [p for p in given if "null" in json.dumps(p["schema"])]


def test_the_lists_that_take_no_limit_are_named(server: ConsoleServer) -> None:
    document = server.get("/openapi.json").json()
    whole = set()
    for path, methods in document["paths"].items():
        operation = methods.get("get", {})
        content = operation.get("responses", {}).get("200", {}).get("content", {})
        kind = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
        fields = document["components"]["schemas"].get(kind, {}).get("properties", {})
        name = path.rpartition("/")[2]
        if fields.get(name, {}).get("type") == "array" and "limit" not in {
            p["name"] for p in operation.get("parameters", ())
        }:
            whole.add(name)
    (said,) = re.findall(r"Three lists take no limit and are always whole: .*?\.", DOCS.read_text())
    assert whole == set(re.findall(r"`(\w+)`", said)) and len(whole) == 3


class Page(HTMLParser):
    """What a page consists of, and whether it is well-formed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = {name: value or "" for name, value in attributes}
        self.ids |= {values["id"]} if "id" in values else set()
        self.links |= {values["href"]} if "href" in values else set()

    def handle_data(self, data: str) -> None:
        self.text += data


def test_what_is_always_sent_is_said_to_be(server: ConsoleServer) -> None:
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    for name in ("WorkerView", "JobSummary"):
        assert set(schemas[name]["required"]) == set(schemas[name]["properties"]), name


def test_the_reference_has_every_operation_and_message(server: ConsoleServer) -> None:
    answer = requests.get(f"{server.base}/docs", timeout=30)
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    page, document = Page(answer.text), server.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"{method.upper()} /api/v1{path}" in page.text
    assert set(document["components"]["schemas"]) <= page.ids
    assert not page.tags & {"script", "link", "img", "iframe"}, "nothing from elsewhere"
    assert {link for link in page.links if not link.startswith("#")} == {"/api/v1/openapi.json"}
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids, "every link leads somewhere"
