"""Drawings in the documentation are what their script draws from the real planner."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_quorum_figure_is_the_planners():
    committed = (ROOT / "docs" / "figures" / "quorum.svg").read_text(encoding="utf-8")
    assert committed == script("draw_figure3").drawing()


def test_the_quorum_figure_shows_the_papers_figures_without_circles_and_arrows_run_down():
    text = (ROOT / "docs" / "figures" / "quorum.svg").read_text(encoding="utf-8")
    for told in ("2 x (93 - 60) = 66", "2 x (93 - 52) = 82", "quorum of 2 at 60", "quorum of 2 at 52", ">156<"):
        assert told in text
    assert "<circle" not in text
    assert "<ellipse" not in text
    arrows = re.findall(r'<path d="M[\d.]+ ([\d.]+) h10 l-5 8 z"', text)
    assert len(arrows) == text.count("<path") == 2
