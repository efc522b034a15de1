"""The prediction of the paper's table: what is published, what is stored, and what the page shows are one."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


table = script("paper_table")


def stored(name):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_published_gains_are_the_papers():
    base = table.PUBLISHED[table.BASELINE]
    gains = {
        name: (100 * (own.throughput / base.throughput - 1), 100 * (own.efficiency / base.efficiency - 1))
        for name, own in table.PUBLISHED.items()
        if name != table.BASELINE
    }
    # Seed 001, figure 4.
    told = {
        "lengthsort": (33.43, 33.43),
        "ls_tg": (40.69, 40.69),
        "fixed_f4": (44.77, 60.26),
        "minskew": (45.33, 61.51),
        "flex_n4": (50.22, 66.13),
        "flex_n2": (47.42, 64.29),
        "flex_p4": (52.74, 65.40),
    }
    for name, (throughput, efficiency) in told.items():
        assert gains[name] == pytest.approx((throughput, efficiency), abs=0.06)


@pytest.mark.parametrize("name", ["paper-table.json", "paper-table-context.json"])
def test_stored_results_are_of_the_committed_workload(name):
    known = stored("paper-workload.json")["cases"]
    for label, found in stored(name)["cases"].items():
        case = {key: value for key, value in found["case"].items() if key != "name"}
        if label == "diagnosis":
            continue
        assert any(case == {key: value for key, value in one.items() if key != "name"} for one in known), label
        assert found["verdict"] == table.verdict(found["rows"])
        assert found["rows"][table.BASELINE]["throughput"] == pytest.approx(3711.3, rel=2e-4)
        assert all(row["problems"] == 0 for row in found["rows"].values())


def test_the_page_shows_the_stored_results():
    page = (ROOT / "docs" / "paper_table.md").read_text(encoding="utf-8")
    found, context = stored("paper-table.json"), stored("paper-table-context.json")
    assert next(iter(found["cases"])) == table.MAIN
    assert page.index(table.markdown(found["cases"][table.MAIN]["rows"])) < page.index(
        table.markdown(found["cases"]["base"]["rows"])
    )
    cells = {form: [cell for cell in found["grid"] if table.form_of(cell) == form] for form in ("spread", "even")}
    assert [len(one) for one in cells.values()] == [12, 12]
    for shown in (
        table.markdown(found["cases"]["diagnosis"]["rows"]),
        table.summary_markdown(found["cases"]),
        table.summary_markdown(context["cases"]),
        *map(table.grid_markdown, cells.values()),
    ):
        assert shown in page


def test_what_the_page_says_of_the_main_prediction():
    page = (ROOT / "docs" / "paper_table.md").read_text(encoding="utf-8")
    rows = stored("paper-table.json")["cases"][table.MAIN]["rows"]
    verdict = table.verdict(rows)
    assert f"| largest miss | {verdict['largest_miss']:.1f} points" in page
    assert f"within 8 in {['no', 'one', 'two', 'three', 'four'][verdict['rows_within_goal']]} of seven rows" in page
    assert ("| order in Q | holds" in page) == verdict["order_holds"]["throughput"]
    assert ("| order in E | holds" in page) == verdict["order_holds"]["efficiency"]


def test_the_growing_spread_is_what_its_rule_asks_for():
    cases = {one["name"]: one for one in stored("paper-workload.json")["cases"] if "name" in one}
    for name in ("spread", "spread_caps"):
        assert cases[name]["fitting"]["length_correlation"] == pytest.approx(0.6, abs=0.002)
        assert cases[name]["fitting"]["outside"] <= 24 / 616
    assert cases["spread"]["fitting"]["outside"] == pytest.approx(24 / 616, rel=0.05)
    assert cases["spread_caps"]["fitting"]["fourth_cap"] == pytest.approx(16384 - 512, rel=0.01)


def test_misses_are_marked_and_counted():
    rows = stored("paper-table.json")["cases"]["base"]["rows"]
    shown = table.markdown(rows)
    missed = sum(abs(row[key]) > table.GOAL_POINTS for row in rows.values() for key in ("miss_q", "miss_e"))
    assert shown.count("**") == 2 * missed
    assert table.verdict(rows)["rows_within_goal"] <= len(rows) - 1


def test_other_distributions_are_refused(tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("output_tokens,probability\n5,1\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"is not the deepseek_r1_client66_pmf\.csv"):
        table.Setting([other, other], None)


def test_the_workload_is_refitted_where_the_distributions_are_at_hand():
    data = ROOT.parent / "shared" / "data"
    paths = [data / one["file"] for one in stored("paper-workload.json")["distributions"]]
    if not all(path.is_file() for path in paths):
        pytest.skip("the distributions are not at hand")
    workload = script("paper_workload")
    parts = tuple(map(workload.read_distribution, paths))
    base = next(one for one in stored("paper-workload.json")["cases"] if one["correlation"] == 0.6)
    fit = workload.fitted(parts, workload.MEAN, workload.CAP_SHARE)
    assert fit == {key: base[key] for key in ("weight", "scale")}
    mean, share = (
        fit["weight"] * first + (1 - fit["weight"]) * second
        for first, second in zip(*(workload.moments(part, fit["scale"]) for part in parts), strict=True)
    )
    assert mean == pytest.approx(6019.4, rel=1e-3)
    assert share == pytest.approx(591 / 15360, rel=0.01)
    spread = next(one for one in stored("paper-workload.json")["cases"] if one.get("name") == "spread")
    fit = {key: spread[key] for key in ("weight", "scale", "growth")}
    seeds = stored("paper-workload.json")["seeds"]
    assert workload.realised(parts, fit, spread["correlation"], seeds) == pytest.approx(spread["drawn"], rel=1e-4)
