"""The page is told where its server is; every other answer passes as it is."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import streamlit
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient
from streamlit import config

from openrecycle.app.runtime.patches import PAGES, PageBase
from openrecycle.app.runtime.settings import Settings
from openrecycle.app.server import streamlit_app
from tests.golden import golden

pytestmark = pytest.mark.processes

MAIN = Path(__file__).resolve().parents[2] / "app" / "ui" / "main.py"
HTML = "<!DOCTYPE html><html><head><title>x</title></head><body><p>y</p></body></html>"
BROWSER = {"Accept": "text/html,application/xhtml+xml"}


async def page(request: Request) -> Response:
    if "if-none-match" in request.headers:
        return Response(status_code=304)
    headers = {"ETag": '"1"', "Content-Encoding": "gzip"} if "accept-encoding" in request.headers else {}
    return Response(HTML, media_type="text/html", headers=headers)


async def streamed(request: Request) -> Response:
    async def parts():  # type: ignore[no-untyped-def]
        for part in (HTML[:20], HTML[20:]):
            yield part.encode()

    return StreamingResponse(parts(), media_type="text/html")


async def other(request: Request) -> Response:
    return JSONResponse({"head": "<head>"}, headers={"ETag": '"1"'})


async def missing(request: Request) -> Response:
    return PlainTextResponse("<head>", 404, media_type="text/html")


@pytest.fixture
def client() -> TestClient:
    inner = Starlette(
        routes=[
            Route("/streamed", streamed),
            Route("/other", other),
            Route("/missing", missing),
            Route("/{path:path}", page),
        ]
    )
    return TestClient(Starlette(routes=[Mount("/", PageBase(inner))]))


@pytest.mark.parametrize("path", ["/", "/schedule", "/streamed"])
def test_a_page_has_the_script_and_its_length(client: TestClient, path: str) -> None:
    answer = client.get(path, headers={**BROWSER, "If-None-Match": '"1"'})
    assert answer.status_code == 200 and "etag" not in answer.headers
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert answer.text.count("window.__streamlit={BACKEND_BASE_URL:") == 1
    css = (MAIN.parent / "assets" / "console.css").read_bytes()
    scripts = [(MAIN.parent / "assets" / name).read_bytes() for name in ("order.js", "history.js", "colours.js")]
    said = b"".join(b"<script>" + script + b"</script>" for script in scripts)
    end = b"<p>y</p><style>" + css + b"</style>" + said + b"</body></html>"
    assert answer.content.endswith(end), "behind the rules that it overrides"
    assert re.sub(r"<(script|style)>.*?</\1>", "", answer.text, flags=re.DOTALL) == HTML


def test_everything_else_is_left_alone(client: TestClient) -> None:
    for path, headers in (("/other", BROWSER), ("/missing", BROWSER), ("/streamed", {"Accept": "*/*"})):
        assert "__streamlit" not in client.get(path, headers=headers).text
    assert client.get("/other", headers=BROWSER).headers["etag"] == '"1"'


def test_every_page_of_the_console_is_known() -> None:
    found = {file.stem for file in MAIN.parent.glob("*.py") if "\ndef page() -> None:" in file.read_text()}
    assert found == {"live", *PAGES}


def test_what_a_page_draws_with_is_asked_for_ahead(tmp_path: Path) -> None:
    js = tmp_path / "static" / "js"
    js.mkdir(parents=True)
    (tmp_path / "index.html").write_text('<link rel="modulepreload" href="./static/js/index.0.js">')
    (js / "PlotlyChart.a1.js").write_text('import{a}from"./part.b2.js";import"./index.0.js";import"./gone.c3.js";')
    (js / "part.b2.js").write_text('import{b}from"./PlotlyChart.a1.js"')
    (js / "index.0.js").touch()
    for static, asked in ((tmp_path, ["PlotlyChart.a1.js", "part.b2.js"]), (tmp_path / "none", [])):
        inner = Starlette(routes=[Route("/{path:path}", page)])
        client = TestClient(Starlette(routes=[Mount("/", PageBase(inner, static))]))
        for path in ("/schedule", "/compare/"):
            text = client.get(path, headers=BROWSER).text
            assert re.findall(r'<link rel="modulepreload"[^>]* href="./static/js/([^"]+)">', text) == asked
            assert text.index("</head>") > text.rfind("<link")
        assert "modulepreload" not in client.get("/help", headers=BROWSER).text


def test_what_stands_before_plotly_gives_what_that_gives(tmp_path: Path) -> None:
    js = tmp_path / "static" / "js"
    js.mkdir(parents=True)
    (tmp_path / "index.html").touch()
    module = js / "PlotlyChart.a1.js"

    def client() -> TestClient:
        inner = Starlette(routes=[Route("/{path:path}", page)])
        return TestClient(Starlette(routes=[Mount("/", PageBase(inner, tmp_path))]))

    module.write_text("var a,b;export{a as PlotlyChart,b as default};")
    text = client().get("/help", headers=BROWSER).text
    found = re.search(r'<script type="importmap">(.*?)</script>', text)
    assert found is not None and found.start() < text.index("</head>")
    held, waits = "./static/js/PlotlyChart.a1.js", "./static/js/chart_waits.js"
    assert json.loads(found[1]) == {"imports": {held: waits}, "scopes": {waits: {held: held}}}
    assert "modulepreload" not in text
    ahead = re.findall(r'modulepreload".*? href="./static/js/([^"]+)"', client().get("/schedule", headers=BROWSER).text)
    assert ahead == ["chart_waits.js", "PlotlyChart.a1.js"]
    answer = client().get("/static/js/chart_waits.js")
    assert answer.headers["content-type"].startswith("text/javascript")
    assert answer.text.endswith(golden("const-whole-await-import-plotlychart"))
    for other_way in ("export default 1;", "export*from'./x.js'", ""):
        module.write_text(other_way)
        assert "importmap" not in client().get("/schedule", headers=BROWSER).text, "it is asked for as it is"
        assert "export" not in client().get("/static/js/chart_waits.js", headers=BROWSER).text


def test_streamlits_own_plotly_has_it_before_it() -> None:
    static = Path(streamlit.__file__).parent / "static"
    text = TestClient(PageBase(Starlette(routes=[Route("/{path:path}", page)]), static)).get("/", headers=BROWSER).text
    assert re.search(r'"imports":{"./static/js/PlotlyChart\.[\w-]+\.js":', text)


def test_pages_have_the_console_s_theme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file stands in a folder where Streamlit does not look by itself, where the server is not started by it."""
    theme = tomllib.loads((MAIN.parents[1] / ".streamlit" / "config.toml").read_text())["theme"]
    monkeypatch.setattr(config, "_main_script_path", config._main_script_path)
    try:
        config.get_config_options(force_reparse=True)
        assert config.get_option("theme.light.primaryColor") is None, "Streamlit's own"
        streamlit_app(Settings())
        for mode in ("light", "dark"):
            assert config.get_option(f"theme.{mode}.primaryColor") == theme[mode]["primaryColor"]
    finally:
        monkeypatch.undo()
        config.get_config_options(force_reparse=True)


def test_the_console_learns_which_page_is_asked_for() -> None:
    asked: list[str] = []
    inner = Starlette(routes=[Route("/other", other), Route("/{path:path}", page)])
    client = TestClient(PageBase(inner, on_page=asked.append))
    for path in ("/", "/simulate?hours=2", "/base/schedule/"):
        client.get(path, headers=BROWSER)
    client.get("/other", headers={"Accept": "*/*"})
    assert asked == ["", "simulate", "schedule"]


@pytest.mark.parametrize(
    ("path", "page"),
    [("/live", "/"), ("/live?job=a&job=b%26", "/?job=a&job=b%26"), ("/base/live", "/base/"), ("/base/live/", "/base/")],
)
def test_the_first_page_is_found_by_its_name_too(client: TestClient, path: str, page: str) -> None:
    """Streamlit said that it was not found, above the page itself."""
    found = client.get(path, headers=BROWSER)
    assert str(found.url).removeprefix(str(client.base_url)) == page and [r.status_code for r in found.history] == [307]
