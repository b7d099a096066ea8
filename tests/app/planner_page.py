"""The Planner page, run as Streamlit runs it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from streamlit.testing.v1 import AppTest
from ui_console import MAIN, ConsoleHere, errors, turn_to, until

from openrecycle.app.console.service import ConsoleService, set_console
from openrecycle.app.plans.solving import Solves
from openrecycle.app.plans.whatif import PARAMS
from openrecycle.app.ui.planner_controls import EXAMPLE, SAVED_PARAM


def page_console(here: ConsoleHere) -> Iterator[ConsoleService]:
    """The console that the page talks to; what it was asked to plan is forgotten afterwards."""
    set_console(here.console)
    yield here.console
    here.console.plans.solves.close()
    here.console.plans.solves = Solves()
    set_console(None)


def open_page(**params: str) -> AppTest:
    test = AppTest.from_file(MAIN, default_timeout=30)
    turn_to(test, "planner")
    for name, word in params.items():
        test.query_params[name] = word
    return run(test)


def run(test: AppTest) -> AppTest:
    test.run()
    assert not test.exception, test.exception[0].message
    return test


def click(test: AppTest, key: str) -> AppTest:
    test.button(key=key).click()
    return run(test)


def words(test: AppTest) -> str:
    parts = [element.proto.body for element in test.get("html")]
    parts += [m.value for kind in ("markdown", "caption", "warning", "success") for m in test.get(kind)]
    return "\n".join([*parts, *errors(test)])


def params(test: AppTest) -> dict[str, str]:
    """The page's own words of the link; Live has left others there."""
    own = {name: v for name, v in test.query_params.items() if name in (*PARAMS, SAVED_PARAM, EXAMPLE)}
    return {name: v if isinstance(v, str) else v[0] for name, v in own.items()}


def compared(test: AppTest) -> dict[str, list[str]]:
    """The table of plans beside each other, by the names of its rows; `figure` is its head."""
    table = next(e.proto.body for e in test.get("html") if "or-beside" in e.proto.body).replace("&nbsp;", " ")
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("<tr>")[1:]]
    return {name: cells for name, *cells in rows}


def settled(test: AppTest, console: ConsoleService) -> AppTest:
    until(lambda: all(s.over for s in console.plans.solves.all()), "all is planned")
    return run(test)


def figure(test: AppTest, index: int = 0) -> dict[str, Any]:
    return json.loads(test.get("plotly_chart")[index].proto.spec)  # type: ignore[no-any-return]


def planned(test: AppTest, console: ConsoleService) -> AppTest:
    return settled(click(test, "planner-plan"), console)
