"""The Help page: the idea in five pictures, first steps, how to connect a job of one's own, and what the colours and
words of the pages mean. Each section is a function, which is drawn when it is chosen."""

from __future__ import annotations

from base64 import b64encode
from html import escape

import streamlit as st

from openrecycle.app.charts.progress import LOOKS
from openrecycle.app.charts.theme import Palette
from openrecycle.app.console.service import get_console
from openrecycle.app.plans.whatif import JOB, IntroductionPicture, pictures
from openrecycle.app.ui import address, components
from openrecycle.app.ui.facts import OVER
from openrecycle.planner.export.picture import draw_svg, small
from openrecycle.planner.plans.drawing import OP_WORDS

MARKS = (
    ("or-op-moved", "Re-routed: runs on a peer in place of its own worker"),
    ("or-op-bubble", "Bubble: the worker waits"),
    ("or-op-ghost", "Faint: the next iteration"),
    ("or-look-failed", "Failed worker; its row is tinted. One that moved, left or never came is grey"),
    ("or-mark-dotted", "Dotted line: where fault-free 1F1B ends"),
)


def page() -> None:
    colours = components.use_style()
    st.html(
        '<h1 class="or-title">Help</h1><div class="or-about">A training job goes on when workers die: their '
        "micro-batches run on living peers of the same stage, in slots that were idle anyway.</div>"
    )
    section = address.segmented_control(
        "Section",
        list(SECTIONS),
        default="idea",
        format_func=SECTIONS.__getitem__,
        key="section",
        label_visibility="collapsed",
        wrap=True,
    )
    {"idea": _idea, "steps": _steps, "own": _own, "colours": _colours, "words": _words, "keys": _keys}[section](colours)


def _idea(colours: Palette) -> None:
    components.quiet(
        f"The worked example of the ReCycle paper: {JOB.pipelines} pipelines of {JOB.stages} stages, "
        f"{JOB.micro_batches} micro-batches each, one slot for F, I and W. The planner has just made these plans."
    )
    components.op_legend(["F", "B", "I", "W"], rerouted=True, ghost=True)
    drawn = st.cache_data(show_spinner=False)(_drawn)(colours.name, colours)
    for number, (title, text, data, alt) in enumerate(drawn, start=1):
        st.html(
            f'<figure class="or-idea"><figcaption><h2 class="or-heading">{number}. {escape(title)}</h2>'
            f"<p>{escape(text)}</p></figcaption>"
            f'<div tabindex="0" role="group" aria-label="Picture {number}"><img src="data:image/svg+xml;base64,{data}" '
            f'alt="{escape(alt)}"></div></figure>'
        )


def _drawn(theme: str, _colours: Palette) -> list[tuple[str, str, str, str]]:
    """Returns (title, text, SVG in base64, words for those who can't see it) of each picture. All have the same time
    axis. Streamlit caches them by the theme."""
    made: list[IntroductionPicture] = list(pictures())
    end = max(max(s.period, s.makespan) for s in (one.drawing.schedule for one in made)) + 3
    out = []
    for one in made:
        svg = draw_svg(small(one.drawing, _colours, end, one.words))
        out.append((one.title, one.text, b64encode(svg.encode()).decode(), one.words))
    return out


def _steps(colours: Palette) -> None:
    demo = any(job.state not in OVER for job in get_console().queries.list_jobs())
    first = f"Start a demo job for this console, in a second terminal: `{demo_line(_address())}`."
    if demo:
        first = "A job is here already: open **Live**."
    st.markdown(
        f"1. {first}\n"
        "2. On **Live**, click a worker, say `W1_2`, then **Kill**, and confirm. Only demo jobs have this button: the "
        "process really dies.\n"
        "3. Watch: the worker turns to *failed*, its peers take re-routed work, the sentence says why, and "
        "*Latest recovery* shows each step in milliseconds. The loss goes on as if nothing had happened.\n"
        "4. **Schedule** shows the plan now in force. Hatched bars are re-routed, grey is idle.\n"
        "5. Back on **Live**, click the dead worker, then **Restart**. It takes its state from a peer, and the full "
        "plan is back.\n"
        "6. **Planner** answers what-ifs: click workers dead, and see what the job would do. **Compare** lays plans on "
        "one time axis, **Catalog** shows what further failures would cost, and **Simulate** what "
        "months of failures cost."
    )
    components.quiet("What a page shows is in its address: send the link, and others see the same.")


def _address() -> str:
    """Returns the address of this console as the reader's browser reaches it."""
    return (st.context.url or "http://127.0.0.1:8501").split("?")[0].removesuffix("/help").rstrip("/")


def _own(colours: Palette) -> None:
    address = _address()
    if get_console().security.access.guarded:
        st.markdown("This console asks for a token. Processes that report to it find it in their environment:")
        st.code(token_line(), language="bash")
    st.markdown("A training script of your own: the model, the data, and the console to report to.")
    st.code(trainer(address), language="python")
    st.markdown(
        "From the command line, with a class that says the same (`openrecycle.agent.models.workload.Workload`):"
    )
    st.code(launch_line(address), language="bash", wrap_lines=True)
    st.markdown("A trainer that keeps its own loop reports to the console and gets its plans:")
    st.code(reporter(address), language="python")
    components.quiet(
        "While the console is away, training goes on, and reports are kept and sent later. But if a worker dies then, "
        "the others wait until the console is back. "
        f"The REST API is described at {address}/api/v1/openapi.json."
    )


def _colours(colours: Palette) -> None:
    st.markdown("The colours stay apart for the colour-blind, and nothing is said by colour alone.")
    for title, rows in (
        ("Ops", [(f"or-op-{kind}", words) for kind, words in OP_WORDS.items()]),
        ("Marks", list(MARKS)),
        ("Workers", [(f"or-look-{state.value}", words) for state, (words, _, _) in LOOKS.items()]),
    ):
        components.heading(title)
        entries = "".join(f'<li><i class="or-shape {css}"></i>{escape(words)}</li>' for css, words in rows)
        st.html(f'<ul class="or-swatches">{entries}</ul>')


def _words(colours: Palette) -> None:
    for title, words in WORDS:
        components.heading(title)
        st.html(
            '<dl class="or-facts">'
            + "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in words)
            + "</dl>"
        )


def _keys(colours: Palette) -> None:
    st.markdown(
        "- **Tab** and **Shift+Tab** go from one control to the next; the worker grid's cells are among them.\n"
        "- **Enter** or **Space** presses what has the focus: on a cell of the grid, it opens the worker.\n"
        "- **Esc** closes a dialog, a menu or an opened chart.\n"
        "- **Arrow keys** go through a table's cells, the entries of a menu, and the choices of a switch.\n"
        "- Every chart has a table beneath it with the same facts, and a description for screen readers."
    )


# The titles of the sections, by their names in the address.
SECTIONS = {
    "idea": "The idea",
    "steps": "First steps",
    "own": "Your own job",
    "colours": "Colours",
    "words": "Words",
    "keys": "Keyboard",
}

WORDS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "The job",
        (
            ("Pipeline", "One copy of the whole model, cut into stages. Pipelines train on different data."),
            ("Stage", "A run of consecutive layers. All workers of one stage hold the same weights."),
            ("Worker W1_2", "The process (and its accelerator) that runs stage 2 of pipeline 1."),
            ("Peer", "A worker of the same stage, in another pipeline: it can do the other's work."),
            ("Micro-batch", "The part of a batch that goes through a pipeline at once; 1·3 is number 3 of pipeline 1."),
            ("Iteration", "All micro-batches forwards and backwards, and one update of the weights."),
        ),
    ),
    (
        "The plan",
        (
            ("F, I, W", "Forward; gradient of the input, which the stage before waits for; gradient of the weights."),
            ("B", "I and W in one piece, where the backward is not split."),
            ("O", "A stage's reduction of its gradients and its optimizer step."),
            ("1F1B", "The usual order: some forwards, then one forward and one backward in turn."),
            ("Profile", "How long each stage's ops take, and what they keep in memory; may be kept by name."),
            (
                "Slot",
                "The unit of op times that are given without one: in the worked example F, I and W take one slot each.",
            ),
            ("Bubble", "Time in which a worker waits."),
            ("Period", "The time from one iteration to the next, when they follow each other at once."),
            (
                "Makespan",
                "From an iteration's first op to its last, the step apart. Staggered, the period can be shorter.",
            ),
            ("Lower bound", "What no plan whatever can be below: proven, not estimated."),
            ("Gap", "How far a plan may be from the best possible: period / bound − 1. At 0 it is proven optimal."),
            ("Critical path", "The ops, one waiting for the other, that make the iteration as long as it is."),
            ("Slowdown", "The period against fault-free 1F1B, and against our own best plan without failures."),
            ("Memory limit", "How many micro-batches a worker may hold at once, from F to W."),
            ("Catalog", "Plans made ahead, one for each way to fail, so that recovery is a look-up."),
            (
                "Migration",
                "A living worker takes the place of a dead one of another stage, with the weights of a peer there.",
            ),
            (
                "Option",
                "What the job can do when workers are lost: re-route, re-partition (move layers to other stages), "
                "migrate and re-route (a worker changes its stage), or stand by (the rest of a pipeline waits, too).",
            ),
        ),
    ),
    (
        "The run",
        (
            ("Heartbeat", "A worker's sign of life, once a second. Its age is shown on hover."),
            (
                "Suspect",
                "A worker that has been silent for longer than 5 s (serve --suspect). After 20 s (--dead) it is out.",
            ),
            (
                "Generation",
                "Who takes part, and with which plan. Each failure, return, drain, move of layers or change of the "
                "plan opens the next one.",
            ),
            ("Plan in force", "The plan that the workers run now."),
            ("Interim plan", "What they run until a worker that joins has its state, or layers have moved."),
            ("Groups", "The connections over which workers exchange data; each generation has its own."),
            ("Fenced", "A worker of an old generation: nothing that it says counts until it re-joins."),
            ("Re-join", "A worker comes back: it takes its state from a peer, and joins between two iterations."),
            ("Drain", "A worker leaves after the iteration in hand: nothing is redone, and it counts as no failure."),
            (
                "Frozen plan",
                "A plan that stays in force until somebody unfreezes it. Only a failure or a drain changes it.",
            ),
            ("Standby", "A second console on the same database, which takes over when the one that leads is gone."),
            ("Throughput", "Samples per second, and as a share of what the job did with all workers."),
            ("Goodput", "Training that counts, over what the same time would have given without any failure."),
            ("ETTR", "Effective training time ratio: time in iterations that count, over all time."),
            ("MTBF", "Mean time between failures."),
        ),
    ),
)


def token_line() -> str:
    """Returns the line that sets the token. Its value is left out: the person who runs the console gives it."""
    return "export OPENRECYCLE_TOKEN=...   # an agent's: openrecycle token create --role agent"


def trainer(address: str) -> str:
    return f"""from functools import partial

import torch
from my_model import build_layer, my_dataset
from openrecycle import Console, Data, Job, Model, ResilientTrainer

if __name__ == "__main__":
    trainer = ResilientTrainer(
        # build_layer: (layer, layers) -> torch.nn.Module
        model=Model(layers=build_layer, layer_count=12, loss=torch.nn.functional.cross_entropy),
        data=Data(my_dataset, batch_size=16),
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        job=Job.uniform(pipelines=2, stages=3, micro_batches=4),
        console=Console(url="{address}"),
    )
    trainer.fit(iterations=1000)"""


def demo_line(address: str) -> str:
    return (
        f"openrecycle train --console {address} --demo --pipelines 3 --stages 4 --micro-batches 6 --iterations 1000 "
        "--pace F=40ms,I=40ms,W=40ms"
    )


def launch_line(address: str) -> str:
    return (
        "openrecycle train --workload my_model:MyWorkload --pipelines 2 --stages 3 --micro-batches 4 "
        f"--iterations 1000 --console {address}"
    )


def reporter(address: str) -> str:
    return f"""from openrecycle import Job, Reporter

reporter = Reporter(
    console="{address}",
    run="run-42",  # the same in all processes of the run, and new for each run
    job=Job.uniform(pipelines=2, stages=3, micro_batches=4),
    worker="W0_1",  # this process
    iterations=1000,
    on_plan=lambda deployment, plan: print(deployment.failed, plan.workers["W0_1"]),
)
for i in range(1000):
    with reporter.op("F"):  # likewise I, W, B and O
        ...
    reporter.iteration(i, loss=0.5)
reporter.close()"""
