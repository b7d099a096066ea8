"""The real console with a real training job, driven in a real browser: kill a worker, watch it heal."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, Page, expect

from tests.browser.layout_shifts import Shifts
from tests.browser.watching import NEEDS_CHROMIUM, SCREENS, assert_it_fits, settle, watched
from tests.conftest import at_length
from tests.golden import golden

ROOT = Path(__file__).resolve().parents[2]
VICTIM = "W1_1"
PEERS = ("W0_1", "W2_1")
# Half of the stages, a fifth of the layers, fewer micro-batches, and longer ops: else most of the test is CPU time of
# the demo. Yet longer ones take no less of it: the page and the console, which work meanwhile, take the difference.
JOB = ("--stages", "2", "--layers", "8", "--micro-batches", "4", "--pace", "F=15ms,I=15ms,W=15ms")
HOME = [4, 4]
LAYERS_OF_1 = "4–7"
# Loaded machines are slow, and the job's processes import torch first.
START_SECONDS = 240.0
CHART = ".js-plotly-plot .main-svg, .stVegaLiteChart .marks"

pytestmark = [
    *NEEDS_CHROMIUM,
    pytest.mark.processes,
    pytest.mark.timeout(420),
]


class Demo:
    """`openrecycle demo` on a free port. `root`: its address; `job_id`: its job, which trains."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.root = f"http://127.0.0.1:{port}"
        self.output = folder / "demo.log"
        environment = {k: v for k, v in os.environ.items() if k not in ("DATABASE_URL", "OPENRECYCLE_TOKEN")}
        command = [sys.executable, "-m", "app", "demo", "--port", str(port), *JOB]
        with self.output.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--database-url", f"sqlite:///{folder / 'demo.db'}"],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self.wait(lambda: requests.get(f"{self.root}/healthz", timeout=5).ok, "the console answers")
            self.wait(lambda: any(job["state"] == "running" for job in self.jobs()), "the job trains")
        except BaseException:
            self.close()
            raise
        self.job_id = str(self.jobs()[0]["job_id"])

    def jobs(self) -> list[dict[str, Any]]:
        return requests.get(f"{self.root}/api/v1/jobs", timeout=5).json()["jobs"]  # type: ignore[no-any-return]

    def get(self, tail: str) -> Any:
        answer = requests.get(f"{self.root}/api/v1/jobs/{self.job_id}{tail}", timeout=10)
        assert answer.ok, answer.text
        return answer.json()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if condition():
                    return
            except (requests.ConnectionError, requests.Timeout):
                pass  # not up yet, or very busy
            assert self.process.poll() is None, f"the demo ended before {what}: {self.output.read_text()}"
            assert time.monotonic() < deadline, (
                f"after {START_SECONDS:g} s still not: {what}: {self.output.read_text()}"
            )
            time.sleep(0.1)

    def close(self) -> int:
        """Ends it as Ctrl-C does; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    demo = Demo(tmp_path_factory.mktemp("demo"))
    yield demo
    demo.close()


@pytest.fixture
def page(tab: Page, demo: Demo) -> Iterator[Page]:
    with watched(tab, demo.root) as page:
        yield page


def card(page: Page, label: str) -> str:
    found = page.locator(".or-card", has=page.locator(".or-label", has_text=label))
    return found.locator(".or-value").inner_text()


def iterations_done(page: Page) -> int:
    return int(card(page, "Iterations done").split()[0].replace(",", ""))


def wait_for_iterations(page: Page, more_than: int) -> None:
    page.wait_for_function(
        """(least) => [...document.querySelectorAll('.or-card')].some(card =>
            card.querySelector('.or-label').textContent.startsWith('Iterations done') &&
            parseInt(card.querySelector('.or-value').textContent.replaceAll(',', '')) > least)""",
        arg=more_than,
        polling=100,
    )


def cell(page: Page, look: str, worker: str) -> Any:
    """The worker's cell, if it is drawn in this state."""
    return page.locator(f".st-key-cell-{look}-{worker}")


def test_kill_and_heal(demo: Demo, page: Page) -> None:
    shifts = Shifts(page)
    page.goto(demo.root)

    # It trains, with all workers, and the page follows.
    expect(cell(page, "running", VICTIM)).to_be_visible()
    expect(page.locator(".or-sentence")).to_contain_text("all 6 workers")
    expect(page.get_by_text("The computation inside is real")).to_be_visible()
    page.locator(CHART).first.wait_for()
    before = iterations_done(page)
    wait_for_iterations(page, before + 1)
    shifts.assert_few("as it came and was refreshed")
    plan_before = demo.get("")["generation"], card(page, "Plan in force")

    # Kill by the button: nothing happens before it is confirmed.
    page.get_by_role("button", name=VICTIM).click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name=f"Kill {VICTIM}")).to_have_count(0)
    dialog.get_by_role("button", name="Kill", exact=True).click()
    expect(dialog).to_contain_text(f"Kill {VICTIM}?")
    expect(dialog).to_contain_text("W0_1 and W2_1")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog.get_by_role("button", name=f"Kill {VICTIM}")).to_have_count(0)
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()
    wait_for_iterations(page, before + 2)
    expect(cell(page, "running", VICTIM)).to_be_visible()
    page.get_by_role("button", name=VICTIM).click()
    page.get_by_role("dialog").get_by_role("button", name="Kill", exact=True).click()
    confirm = page.get_by_role("dialog").get_by_role("button", name=f"Kill {VICTIM}")
    expect(confirm).to_be_visible()
    shifts.forget()  # the dialog's parts are moved by the question, on a busy machine later than half a second
    confirm.click()

    # It is seen, the plan changes, peers take the work, training goes on.
    expect(cell(page, "failed", VICTIM)).to_be_visible()
    for peer in PEERS:
        expect(cell(page, "re-routed", peer)).to_be_visible()
        expect(page.get_by_role("button", name=peer)).to_contain_text("+2 re-routed")
    expect(page.locator(".or-card", has_text=re.compile(r"generation [2-9]"))).to_be_visible()
    assert card(page, golden("plan-in-force")) != plan_before[1]
    expect(page.locator(".or-recovery")).to_contain_text(VICTIM)
    expect(page.locator(".or-events")).to_contain_text(f"{VICTIM} failed")
    expect(page.locator(".or-sentence .or-state")).to_have_text("degraded")
    wait_for_iterations(page, iterations_done(page) + 2)
    shifts.assert_few("as a worker was lost")

    # Layers move to other stages, beside the training, and the plan is a shorter one than that which re-routes alone.
    expect(page.locator(".or-colhead").nth(1)).not_to_contain_text(LAYERS_OF_1)
    demo.wait(lambda: not demo.get("")["moving_to"], "the layers have moved")
    generations = {g["partition"] != HOME: g for g in demo.get("/generations")["generations"] if g["failed"]}
    rerouted, moved = (demo.get(f"/plans/{generations[at]['plan_fingerprint']}") for at in (False, True))
    assert generations[True]["moved_at"] is not None and demo.get("")["partition"] == moved["partition"]
    assert rerouted["failed"] == moved["failed"] == [VICTIM]
    assert moved["metrics"]["period"] < 0.9 * rerouted["metrics"]["period"]
    expect(page.locator(".or-sentence .or-state")).to_have_text("degraded")
    shifts.assert_few("as layers moved")

    # The console's record agrees with the page.
    assert demo.get("")["generation"] > plan_before[0]
    states = {w["name"]: w["state"] for w in demo.get("/workers")["workers"]}
    assert states.pop(VICTIM) == "failed" and {states.pop(peer) for peer in PEERS} == {"re-routed"}
    assert set(states.values()) == {"running"}

    # Bring it back the same way.
    page.get_by_role("button", name=VICTIM).click()
    page.get_by_role("dialog").get_by_role("button", name="Restart", exact=True).click()
    restart = page.get_by_role("dialog").get_by_role("button", name=f"Restart {VICTIM}")
    restart.wait_for()
    shifts.forget()
    restart.click()
    expect(cell(page, "running", VICTIM)).to_be_visible()
    expect(page.locator(".or-sentence")).to_contain_text("all 6 workers")
    expect(page.locator(".or-colhead").nth(1)).to_contain_text(LAYERS_OF_1)
    demo.wait(lambda: demo.get("")["partition"] == HOME and not demo.get("")["moving_to"], "layers are back")
    wait_for_iterations(page, iterations_done(page) + 1)
    shifts.assert_few("as it came back")


@pytest.mark.chaos
def test_manual_approval(demo: Demo, page: Page) -> None:
    """In manual mode a loss waits for an operator, who compares the options and takes one."""
    page.goto(demo.root)
    expect(page.locator(".or-sentence")).to_contain_text("all 6 workers")
    page.get_by_role("button", name="Automatic").click()
    page.get_by_role("radiogroup", name="Who decides").get_by_text("Manual", exact=True).click()
    choice_timeout = page.get_by_role("spinbutton", name="Seconds to choose in")
    expect(choice_timeout).to_be_enabled()
    choice_timeout.fill("3600")
    choice_timeout.press("Enter")
    page.get_by_role("button", name="Apply", exact=True).click()
    expect(page.get_by_role("button", name="Manual")).to_be_visible()
    page.keyboard.press("Escape")
    generation = demo.get("")["generation"]

    page.get_by_role("button", name=VICTIM).click()
    page.get_by_role("dialog").get_by_role("button", name="Kill", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name=f"Kill {VICTIM}").click()
    ways = page.locator(".st-key-ways-on .or-way")
    expect(ways.nth(1)).to_be_visible()
    expect(page.locator(".or-sentence")).to_contain_text("Waiting for you")
    assert ways.filter(has_text="re-route").count() >= 1
    expect(ways.first).to_contain_text("Layers per stage")
    boxes = [way.bounding_box() for way in ways.all()]
    assert len({round(box["y"]) for box in boxes if box}) == 1, "they stand side by side"
    assert len({round(box["x"]) for box in boxes if box}) == len(boxes)
    assert demo.get("")["generation"] == generation, "nothing is decided before somebody has chosen"

    page.locator(".st-key-choose-re-route button").click()
    rolled = page.locator(".or-roll-out")
    expect(rolled).to_contain_text(f"Generation {generation + 1}: all 5 workers train by it")
    rolled.locator("summary").click()
    expect(rolled.locator("tbody tr")).to_have_count(5)
    for peer in PEERS:
        expect(rolled.locator("tbody tr", has_text=peer)).to_contain_text("ms")
    expect(cell(page, "re-routed", PEERS[0])).to_be_visible()
    expect(ways.first).to_be_hidden()
    events = [e["text"] for e in demo.get("/events?limit=500")["events"]]
    assert any(golden("operator-in-the-browser-chose") in text for text in events)

    # The schedule shows the new plan, with the failed row and the re-routed micro-batches.
    page.get_by_role("link", name="Schedule").click()
    chart = page.locator(".js-plotly-plot .annotation-text")
    expect(chart.filter(has_text="failed")).to_contain_text("W0_1 and W2_1")
    expect(page.locator(".js-plotly-plot .bars text", has_text="1·0").first).to_be_visible()
    page.get_by_role("link", name="Live").click()

    # As it was, for whoever comes next.
    base = f"{demo.root}/api/v1/jobs/{demo.job_id}"
    assert requests.put(f"{base}/mode", json={"mode": "automatic"}, timeout=10).ok
    assert requests.post(f"{base}/workers/{VICTIM}/restart", timeout=10).ok
    expect(page.locator(".or-sentence")).to_contain_text("all 6 workers")
    demo.wait(lambda: demo.get("")["partition"] == HOME and not demo.get("")["moving_to"], "layers are back")


def at_rest(job: dict[str, Any]) -> bool:
    """All that is said of it stays said for a while."""
    ahead = job["plans_to_make"] and job["planned_ahead"] == job["plans_to_make"]
    return bool(ahead and job["condition"] == "running" and job["living"] == job["workers"] and not job["moving_to"])


@pytest.mark.parametrize(("scheme", "width", "height"), [*(at_length(*screen) for screen in SCREENS[:2]), *SCREENS[2:]])
def test_nothing_is_cut_or_pushed_out(browser: Browser, demo: Demo, scheme: Any, width: int, height: int) -> None:
    """Both pages fit the screen's width in both themes, and say in words what their charts show."""
    demo.wait(lambda: at_rest(demo.get("")), "the deaths of the tests before are history")
    with watched(browser, demo.root, width=width, height=height, scheme=scheme) as page:
        shifts = Shifts(page)
        for path in ("/", "/schedule"):
            page.goto(demo.root + path)
            page.locator(CHART).first.wait_for()
            settle(page)
            shifts.assert_few("as it came")
            assert_it_fits(page, ".or-card *", ".or-sentence *", ".st-key-worker-grid button")


@pytest.mark.chaos
def test_charts_are_updated_in_place(demo: Demo, page: Page) -> None:
    """A chart that is built anew at each refresh flickers, and forgets the reader's zoom."""
    page.goto(demo.root)
    page.locator(CHART).first.wait_for()
    page.evaluate("(chart) => { window.charts = [...document.querySelectorAll(chart)] }", CHART)
    assert page.evaluate("window.charts.length") == 2
    wait_for_iterations(page, iterations_done(page) + 2)
    still_there = page.evaluate("window.charts.every(chart => chart.isConnected)")
    assert still_there, "the charts were torn down at a refresh"

    # Zooming into one of them has the link say where to, and the other one follow.
    page.locator(CHART).first.hover(position={"x": 60, "y": 60})
    page.keyboard.down("Alt")
    page.mouse.wheel(0, -400)
    page.keyboard.up("Alt")
    page.wait_for_url("**iterations=**")
    assert page.evaluate("window.charts[0].isConnected"), "the one that is looked at was torn down"
    page.wait_for_function("!window.charts[1].isConnected")
    page.goto(f"{demo.root}/?iterations=1-3")
    shown = """() => [...document.querySelectorAll('[aria-label^="X-axis"]')].map(
        axis => [...axis.querySelectorAll('.role-axis-label text')].map(label => label.textContent).join())"""
    page.wait_for_function(f"({shown})().join(' ') === '1,2,3 1,2,3'")
    wait_for_iterations(page, iterations_done(page) + 2)
    assert page.evaluate(shown) == ["1,2,3", "1,2,3"] and "iterations=1-3" in page.url


@pytest.mark.chaos
def test_a_zoom_holds_where_the_console_is_far_away(demo: Demo, browser: Browser) -> None:
    """A refresh is asked for before the browser hears of the zoom's address, and comes after it."""
    with watched(browser, demo.root) as page:
        page.add_init_script(
            """window.WebSocket = class extends WebSocket {
                send(data) { setTimeout(() => super.send(data), 1500) }
            }"""
        )
        page.goto(demo.root)
        page.locator(CHART).nth(1).wait_for()
        page.evaluate("(chart) => { window.looked_at = document.querySelector(chart) }", CHART)
        page.locator(CHART).first.hover(position={"x": 60, "y": 60})
        page.keyboard.down("Alt")
        page.mouse.wheel(0, -400)
        page.keyboard.up("Alt")
        page.wait_for_url("**iterations=**")
        zoomed = page.url
        wait_for_iterations(page, iterations_done(page) + 3)
        assert page.evaluate("window.looked_at.isConnected") and page.url == zoomed


@pytest.mark.chaos
def test_workers_can_be_reached_by_keyboard(demo: Demo, page: Page) -> None:
    page.goto(demo.root)
    button = page.get_by_role("button", name="W0_0")
    button.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("pipeline 0, stage 0")
    page.wait_for_function("document.querySelector('[role=dialog]').contains(document.activeElement)")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
