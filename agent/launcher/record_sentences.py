"""The lines of a run's record as sentences for people."""

from __future__ import annotations

from typing import Any

from openrecycle.agent.messages.protocol import Iteration, Recovery


def sentence_of(line: dict[str, Any]) -> str:
    """What a terminal or a log shows for a line of the record."""
    if "validation" in line:
        return _validation(**line["validation"])
    if "warning" in line:
        return str(line["warning"])
    if "raised" in line:
        return "\n".join([line["raised"]["text"], *line["raised"]["traceback"]])
    if "checkpoint" in line:
        return _checkpoint(**line["checkpoint"])
    if "failure" in line:
        return _recovery(Recovery(**line["failure"]))
    if "gradient_norm" in line:
        norm = line["gradient_norm"]
        return f"iteration {norm['iteration']}: gradient norm {float.fromhex(norm['norm']):.4g}"
    if "evaluation" in line:
        return _evaluation(**line["evaluation"])
    if "hand_over" in line:
        return f"{line['hand_over']['worker']} {line['hand_over']['text']}"
    if "move" in line:
        move = line["move"]
        return f"generation {move['generation']}: {move['worker']} takes the place of {move['to']} ({move['reason']})"
    if "left" in line:
        left = line["left"]
        return f"generation {left['generation']}: {left['worker']} leaves ({left['reason']})"
    if "relayout" in line:
        return _relayout(**line["relayout"])
    if "final" in line:
        return f"parameters {line['final']['parameters_sha256']}"
    loss = float.fromhex(line["loss"])
    return (
        f"iteration {line['iteration']:>5}  loss {loss:.4f}  {1000 * line['seconds']:7.1f} ms  "
        f"generation {line['generation']}  {line['living']} workers"
    ) + (f"  without micro-batches {', '.join(map(str, line['skipped']))}" if line.get("skipped") else "")


def is_remark(line: dict[str, Any]) -> bool:
    """Is it about something out of the ordinary?"""
    return not any(key in line for key in ("iteration", "gradient_norm", "final"))


def iteration_of(line: dict[str, Any]) -> Iteration:
    """What agent.launcher.launch.iteration_line made the line of."""
    return Iteration(loss_hex=line["loss"], **(line | {"loss": float.fromhex(line["loss"])}))


def _evaluation(iteration: int, values: dict[str, str]) -> str:
    means = (f"{name} {float.fromhex(value):.4f}" for name, value in values.items())
    return f"evaluation after {iteration} iterations: {', '.join(means)}"


def _validation(iteration: int, coefficient: float | None, redone: bool) -> str:
    if coefficient is None:
        what = "a gradient was NaN, infinite or out of range; its update is skipped"
    else:
        what = f"the gradients are clipped to {coefficient:.3g} of their size"
    return f"iteration {iteration}: {what}" + ("; what followed begins anew" if redone else "")


def _relayout(
    generation: int, iteration: int, partition: list[int], moved_layers: int, stall_ms: float, reason: str
) -> str:
    return (
        f"generation {generation}: layers per stage are {', '.join(map(str, partition))} from iteration {iteration} "
        f"on; {moved_layers} moved in {stall_ms:.0f} ms ({reason})"
    )


def _checkpoint(iteration: int, problem: str | None) -> str:
    if problem is None:
        return f"checkpoint of iteration {iteration} is written"
    return f"warning: no checkpoint of iteration {iteration}: {problem}; training goes on"


def _recovery(recovery: Recovery) -> str:
    return (
        f"{recovery.worker} died: seen after {recovery.detected_ms:.0f} ms, survivors free after "
        f"{recovery.unblocked_ms:.0f} ms, re-formed after {recovery.reformed_ms:.0f} ms, "
        f"the redone iteration committed after {recovery.resumed_ms:.0f} ms"
    )
