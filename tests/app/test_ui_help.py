"""The Help page: its pictures are plans, its snippets are code, its words are those of the pages."""

from __future__ import annotations

import ast
from base64 import b64decode
from collections.abc import Iterator
from typing import Literal
from xml.etree import ElementTree

import pytest
from streamlit.testing.v1 import AppTest
from ui_console import MAIN, ConsoleHere, JobHere, turn_to

from openrecycle.agent.messages.protocol import JobFinished
from openrecycle.app.charts.theme import DARK, LIGHT, Palette
from openrecycle.app.console.service import set_console
from openrecycle.app.plans.whatif import pictures
from openrecycle.app.ui.help import SECTIONS, reporter, token_line, trainer
from openrecycle.planner.check import check
from openrecycle.planner.export.picture import draw_svg, small
from tests.golden import golden

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleHere]:
    made = ConsoleHere(tmp_path_factory.mktemp("help"))
    set_console(made.console)
    yield made
    set_console(None)
    made.close()


def open_page(section: str = "") -> AppTest:
    test = AppTest.from_file(MAIN, default_timeout=30)
    if section:
        test.query_params["section"] = SECTIONS[section]
    turn_to(test, "help").run()
    assert not test.exception, test.exception[0].message
    return test


def words(test: AppTest) -> str:
    parts = [element.proto.body for element in test.get("html")]
    return "\n".join(parts + [m.value for m in test.get("markdown")])


def test_the_pictures_are_plans_that_check() -> None:
    made = pictures()
    assert [p.plan.metrics.period for p in made[:4]] == [27, 36, 29, 27]
    assert all(check(p.plan) == [] and p.plan.solver.status == "optimal" for p in made)
    assert "+33.3 %" in made[1].text and "+7.4 %" in made[2].text and golden("as-many-as-without") in made[3].text
    assert made[4].plan.metrics.period < 30
    assert f"{made[4].plan.metrics.period} slots instead of 55 slots" in made[4].title
    assert golden("takes-the-place-of-2") in made[4].text


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_each_op_is_drawn_once_and_the_failed_say_so(colours: Palette) -> None:
    for one in pictures():
        schedule = one.plan.schedule()
        root = ElementTree.fromstring(draw_svg(small(one.drawing, colours, 60, one.words)))
        texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
        numbers = [t for t in texts if t.replace("·", "").isdigit()]
        assert len(numbers) == sum(1 for op in schedule.compute_ops())
        assert sum("·" in t for t in numbers) == sum(op.rerouted for op in schedule.compute_ops())
        assert sum(t.startswith("✕ failed") for t in texts) == len(one.plan.failed) - len(one.moved)
        assert sum(t.startswith(golden("moved-to-w0-2")) for t in texts) == len(one.moved)
        assert f"{schedule.period} slots" in texts
        assert f"over {schedule.period} slots" in one.words


def test_the_idea_shows_five_pictures_with_words(here: ConsoleHere) -> None:
    page = words(open_page())
    assert page.count('<img src="data:image/svg+xml;base64,') == 5
    for one in pictures():
        assert one.title in page
        assert one.words in page
    first = page.split("base64,")[1].split('"')[0]
    assert ElementTree.fromstring(b64decode(first)).tag.endswith("svg")


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("steps", ["--demo", "Restart"]),
        ("colours", ["Forward", "Failed", "Joining", "or-look-suspect", "or-op-moved"]),
        ("words", ["Period", "Lower bound", "ETTR", "Fenced"]),
        ("keys", ["Shift+Tab", "Esc"]),
    ],
)
def test_every_section_has_its_own_link(here: ConsoleHere, section: str, expected: list[str]) -> None:
    page = words(open_page(section))
    assert all(word in page for word in expected)


def test_with_a_job_the_first_step_is_to_look_at_it(here: ConsoleHere) -> None:
    JobHere(here.console, "here already")
    assert golden("a-job-is-here-already") in words(open_page("steps"))


@pytest.mark.parametrize("how", ["finished", "stopped"])
def test_a_job_that_is_over_is_none_to_look_at(here: ConsoleHere, how: Literal["finished", "stopped"]) -> None:
    for job in here.console.queries.list_jobs():
        here.console.reports.finish(job.job_id, JobFinished(state="finished"))
    job = JobHere(here.console, "over").register()
    assert golden("a-job-is-here-already") in words(open_page("steps"))
    here.console.reports.finish(job.job_id, JobFinished(state=how))
    page = words(open_page("steps"))
    assert golden("a-job-is-here-already") not in page and "--demo" in page


def test_snippets_name_this_console_and_no_token(here: ConsoleHere) -> None:
    test = open_page("own")
    codes = [code.value for code in test.code]
    assert len(codes) == 3, "a console without a token needs no line for it"
    assert all("http://" in code for code in codes)
    for code in (trainer("http://h:1"), reporter("http://h:1")):
        tree = ast.parse(code)
        ours = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "openrecycle"]
        names = {alias.name for node in ours for alias in node.names}
        assert names
        package = __import__("openrecycle")
        assert all(hasattr(package, name) for name in names)
        assert "http://h:1" in code
    assert token_line().startswith("export OPENRECYCLE_TOKEN=...")
