"""The HTML pages: whole in themselves, and drawn without an error in a real browser where there is one."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import yaml
from simulate_runs import SETTINGS
from test_simulate_command import files, simulate  # noqa: F401 (files is a fixture)

from flexfloor.cli.main import run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTHS = (1280, 700)
PROBE = """
<pre id="probe"></pre><script>
window.addEventListener("load", () => setTimeout(() => {
  document.querySelectorAll("details").forEach(fold => { fold.open = true; });
  setTimeout(() => {
    const charts = [...document.querySelectorAll(".plotly-graph-div")];
    document.getElementById("probe").textContent = JSON.stringify({
      errors: window.seen,
      charts: charts.length,
      empty: charts.filter(chart => !chart.querySelector(".main-svg")).length,
      marks: charts.map(chart => chart.querySelectorAll(".point path, path.point, .js-line").length),
      narrow: charts.filter(chart => chart.getBoundingClientRect().width < 150).length,
      outside: charts.filter(chart => chart.getBoundingClientRect().right > document.body.clientWidth + 1).length,
      fetched: performance.getEntriesByType("resource").map(entry => entry.name),
      overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
      sections: [...document.querySelectorAll("section h2")].map(head => head.textContent),
    });
  }, 1500);
}, 500));
</script>
"""
CATCH = "<script>window.seen = []; window.addEventListener('error', e => window.seen.push(String(e.message)));</script>"


@pytest.fixture
def pages(files, tmp_path, capsys):  # noqa: F811
    """A report of two runs and a page of a comparison with a sweep."""
    ours, theirs = tmp_path / "flex", tmp_path / "verl"
    assert simulate(files, "--out", ours) == 0
    files["flexfloor.yaml"].write_text(yaml.safe_dump({"flexfloor": {**SETTINGS, "method": "verl"}}))
    assert simulate(files, "--out", theirs) == 0
    files["flexfloor.yaml"].write_text(yaml.safe_dump({"flexfloor": SETTINGS}))
    report, compared = tmp_path / "report.html", tmp_path / "compare.html"
    assert run(["report", str(ours), "--baseline", str(theirs), "--html", str(report)]) == 0
    assert simulate(files, "--compare", "--sweep", "mu=1,1.3", "--html", compared) == 0
    capsys.readouterr()
    return {"report": report, "compare": compared}


class Page(HTMLParser):
    """Ids, inline scripts, and whatever a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.scripts, self.fetched, self._script = [], [], [], None
        self.open, self.void = [], {"meta", "br", "img", "input", "link", "hr"}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.fetched += [given[name] for name in ("src", "href", "data", "action") if name in given]
        if tag == "script":
            self._script = ""
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag
        if tag == "script":
            self.scripts.append(self._script)
            self._script = None

    def handle_data(self, data):
        if self._script is not None:
            self._script += data


def drawn(script):
    """(id, data, layout, settings) of every Plotly.newPlot call."""
    decoder, found = json.JSONDecoder(), []
    for match in re.finditer(r"Plotly\.newPlot\(", script):
        at, values = match.end(), []
        for _ in range(4):
            at = re.compile(r"[\s,]*").match(script, at).end()
            value, at = decoder.raw_decode(script, at)
            values.append(value)
        found.append(values)
    return found


@pytest.mark.parametrize("name", ["report", "compare"])
def test_a_page_is_whole_without_a_network(pages, name):
    text = pages[name].read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    assert page.fetched == []
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL).group(1)
    assert "url(" not in style
    assert "@import" not in style
    bundle = max(page.scripts, key=len)
    own = [script for script in page.scripts if script is not bundle]
    assert "Plotly" in bundle[:2_000_000]
    assert not any("http:" in script or "https:" in script for script in own if "newPlot" not in script)
    charts = [chart for script in own for chart in drawn(script)]
    assert len(charts) >= 4
    for identity, data, layout, settings in charts:
        assert identity in page.ids
        assert data
        assert settings["responsive"] is True
        assert "source" not in str(layout.get("images", ""))
    for script in own:
        for identity in re.findall(r'getElementById\("([^"]+)"\)', script):
            assert identity in page.ids


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "compare"])
def test_a_browser_draws_the_page(pages, tmp_path, name, width):
    browser = next((found for found in map(shutil.which, BROWSERS) if found), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    text = pages[name].read_text(encoding="utf-8")
    probed = tmp_path / f"probed-{name}.html"
    probed.write_text(text.replace("<head>", f"<head>{CATCH}").replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    command = [browser, "--headless", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000", f"--window-size={width},900"]
    command += ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    done = subprocess.run([*command, "--dump-dom", probed.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    told = re.search(r'<pre id="probe">(\{.*?\})</pre>', done.stdout, re.DOTALL)
    assert told, "the page's scripts did not run to their end"
    probe = json.loads(told.group(1).replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    assert probe["errors"] == []
    assert probe["fetched"] == []
    assert probe["charts"] >= 4
    assert (probe["empty"], probe["narrow"], probe["outside"]) == (0, 0, 0)
    assert all(marks > 0 for marks in probe["marks"])
    assert probe["overflow"] <= 0
    wanted = {"report": {"Ranks over time", "Figures", "Checks"}, "compare": {"Methods", "Assumed, not measured here"}}
    assert wanted[name] <= set(probe["sections"])
