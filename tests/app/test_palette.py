"""The colours of ops and states can be told apart by everybody, and what is written can be read.

Full protanopia, deuteranopia and tritanopia as Viénot, Brettel and Mollon (1999) and Brettel et al. (1997)
simulate them, in the one-plane form on linear RGB; distances are CIEDE76 in CIE L*a*b* (D65).
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from openrecycle.app.charts.theme import DARK, LIGHT, Palette
from openrecycle.app.ui.simulate import LOOKS, look

Colour = NDArray[np.float64]

# sRGB to LMS of Smith and Pokorny, as Viénot et al. have it, and their confusion planes.
LMS = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
PLANES = {
    "protanopia": np.array([[0, 2.02344, -2.52581], [0, 1, 0], [0, 0, 1]]),
    "deuteranopia": np.array([[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]]),
    "tritanopia": np.array([[1, 0, 0], [0, 1, 0], [-0.395913, 0.801109, 0]]),
}
SIGHT = ("trichromacy", *PLANES)
THEMES = pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])


def linear(colour: str) -> Colour:
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def seen(colour: str, sight: str) -> Colour:
    """Linear RGB."""
    rgb = linear(colour)
    if sight == "trichromacy":
        return rgb
    return np.clip(np.linalg.inv(LMS) @ PLANES[sight] @ LMS @ rgb, 0, 1)


def lab(rgb: Colour) -> Colour:
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    t = xyz / np.array([0.95047, 1.0, 1.08883])
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(one: str, other: str, sight: str) -> float:
    return float(np.linalg.norm(lab(seen(one, sight)) - lab(seen(other, sight))))


def contrast(one: str, other: str) -> float:
    """Of WCAG 2."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted(float(weights @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@THEMES
@pytest.mark.parametrize("sight", SIGHT)
def test_op_colours_are_apart_for_everybody(palette: Palette, sight: str) -> None:
    for (a, one), (b, other) in combinations(palette.ops.items(), 2):
        assert distance(one, other, sight) >= 20, f"{a} and {b}: {distance(one, other, sight):.1f}"


@THEMES
@pytest.mark.parametrize("sight", SIGHT)
def test_each_policy_of_a_simulation_has_a_colour_of_its_own(palette: Palette, sight: str) -> None:
    drawn = {name: look(name, palette)[0] for name in LOOKS}
    for (a, one), (b, other) in combinations(drawn.items(), 2):
        assert distance(one, other, sight) >= (30 if sight == "trichromacy" else 18), f"{a} and {b}"
    for name, colour in drawn.items():
        assert contrast(colour, palette.background) >= 3, name  # WCAG's of what is drawn


@THEMES
def test_words_and_lines_stand_out_from_the_page(palette: Palette) -> None:
    for name in ("text", "muted", "failed_text", "rerouted_text", "joining_text"):
        assert contrast(getattr(palette, name), palette.background) >= 4.5, name
    for kind, colour in palette.op_lines.items():
        assert contrast(colour, palette.background) >= 3, kind


def test_runs_with_different_numbers_of_spares_are_told_apart() -> None:
    assert len({look(f"spares-{n}", LIGHT) for n in (1, 2, 3)}) == 3


@THEMES
@pytest.mark.parametrize("sight", SIGHT)
def test_an_op_stands_out_from_the_idle_track(palette: Palette, sight: str) -> None:
    for kind, colour in palette.ops.items():
        assert distance(colour, palette.track, sight) >= 20, kind


@THEMES
@pytest.mark.parametrize("sight", SIGHT)
def test_a_failed_worker_is_not_taken_for_a_healthy_one(palette: Palette, sight: str) -> None:
    for name in ("healthy", "rerouted"):
        assert distance(palette.failed, getattr(palette, name), sight) >= 20, name


@THEMES
def test_numbers_in_bars_and_words_on_the_page_can_be_read(palette: Palette) -> None:
    for kind, colour in palette.ops.items():
        assert contrast(colour, palette.ops_text[kind]) >= 4.5, kind
    for name in ("text", "muted", "failed_text", "rerouted_text", "good", "accent"):
        for ground in (palette.background, palette.surface):
            assert contrast(getattr(palette, name), ground) >= 4.5, f"{name} on {ground}"


def test_the_simulation_confuses_what_the_colour_blind_confuse() -> None:
    """Red and green of one lightness for the first two, blue and green for the third; nothing else."""
    for sight in ("protanopia", "deuteranopia"):
        assert distance("#C05858", "#4F8F4F", sight) < 0.5 * distance("#C05858", "#4F8F4F", "trichromacy")
    assert distance("#3B8FB5", "#2F9B7C", "tritanopia") < 0.5 * distance("#3B8FB5", "#2F9B7C", "trichromacy")
    for sight in SIGHT:
        assert distance("#FFFFFF", "#000000", sight) == pytest.approx(100, abs=1)
