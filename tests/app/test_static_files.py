"""Streamlit's files are sent as Streamlit would send them; all else is its own answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from streamlit.file_util import get_static_dir
from streamlit.web.server.starlette.starlette_static_routes import create_streamlit_static_handler

from openrecycle.app.runtime.patches import AT_ONCE, ELEMENTS, LATER, WAITS, PageBase, StaticFiles

pytestmark = pytest.mark.processes

STATIC = Path(get_static_dir())
JS = STATIC / "static" / "js"
BROWSER = {"Accept": "text/html"}


async def streamlit_answers(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    await PlainTextResponse(f"asked for {Request(scope).url.path}")(scope, receive, send)


@pytest.fixture
def client() -> TestClient:
    return TestClient(StaticFiles(streamlit_answers, STATIC))


@pytest.mark.parametrize(
    "pattern", ["js/PlotlyChart.*.js", "js/Html.*.js", "css/index.*.css", "media/SourceSans*.woff2"]
)
def test_a_file_is_sent_as_streamlit_would(client: TestClient, pattern: str) -> None:
    path = next((STATIC / "static").glob(pattern))
    assert "Plotly" not in pattern or path.stat().st_size > AT_ONCE
    address = f"/static/{path.parent.name}/{path.name}"
    answer = client.get(address)
    theirs = TestClient(create_streamlit_static_handler(str(STATIC), None)).get(address)
    assert answer.status_code == 200 and answer.content == theirs.content == path.read_bytes()
    for name in ("content-length", "cache-control"):
        assert answer.headers[name] == theirs.headers[name]
    assert answer.headers["content-type"] == theirs.headers["content-type"].partition(";")[0]


@pytest.mark.parametrize("path", ["/", "/static/js/none.js", "/static/js/../../index.html", "/static/js/", "/x.js"])
def test_all_else_is_left_to_streamlit(client: TestClient, path: str) -> None:
    assert client.get(path).text.startswith("asked for")


def test_a_part_or_a_question_whether_it_has_changed_is_left_to_streamlit(client: TestClient) -> None:
    address = f"/static/js/{next(JS.glob('Html.*.js')).name}"
    for headers in ({"Range": "bytes=0-9"}, {"If-None-Match": '"1"'}):
        assert client.get(address, headers=headers).text.startswith("asked for")
    assert client.post(address).text.startswith("asked for")


def test_a_file_that_has_gone_is_left_to_streamlit(tmp_path: Path) -> None:
    (tmp_path / "static" / "js").mkdir(parents=True)
    path = tmp_path / "static" / "js" / "a.js"
    path.write_text("1")
    client = TestClient(StaticFiles(streamlit_answers, tmp_path))
    assert client.get("/static/js/a.js").text == "1"
    path.unlink()
    assert client.get("/static/js/a.js").text.startswith("asked for")


@pytest.mark.parametrize("page", ELEMENTS)
def test_all_that_a_page_is_told_to_ask_for_ahead_is_there_and_is_whole(page: str) -> None:
    """Each link names a file; what a file imports is named as well, by Streamlit's page or by ours."""

    async def index(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        html = (STATIC / "index.html").read_text()
        await PlainTextResponse(html, media_type="text/html")(scope, receive, send)

    client = TestClient(PageBase(index, STATIC))
    html = client.get(f"/{page}", headers=BROWSER).text
    named = re.findall(r'(?:src|href)="\./static/js/([^"]+)"', html)
    ahead = re.findall(r'fetchpriority="low" href="\./static/js/([^"]+)"', html)
    assert len(named) == len(set(named)) and ahead
    for kind in ELEMENTS[page]:
        assert any(name.startswith(kind) for name in ahead), f"Streamlit has no {kind} any more"
    run = re.findall(r'import\("\./static/js/([^"]+)"\)', html)
    assert [name in ahead for name in run] == [True] * (page in LATER)
    for name in ahead:
        code = client.get(f"/static/js/{name}").text if name == WAITS else (JS / name).read_text()
        imported = re.findall(r'(?:from|import)\s*\(?"\./([^"]+\.js)"', code)
        assert set(imported) <= set(named), f"{name} imports more"
