"""What the benchmark beside stock vLLM found, as tables."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table


def show(result: dict[str, Any]) -> None:
    """The figures as tables."""
    console = Console(width=150)
    for row in result.get("first_shrinks", ()):
        for commit in row["commits"]:
            console.print(f"{row['set']}: to EP {commit['to']}, tokens apart by {commit['token_gap_ms']} ms, {commit}")
    for name, title in (("no_plan", "no plan"), ("combine", "invariant combine")):
        for key in ("throughput", "step") if name in result else ():
            ratio = result[name][key]
            console.print(
                f"{title}, {key}, ours / stock: median {ratio['median']:.4f}, {ratio['low']:.4f} to "
                f"{ratio['high']:.4f} ({len(ratio['ratios'])} pairs)"
            )
    table = Table("set", "arm", "T, s", "foretold", "H, rank-s", "foretold", "Q", "E", "E / stock's", "foretold")
    for name, arms in result.get("arms", {}).items():
        told = result["foretold"][name]
        base = statistics.median(a["E"] for a in arms["stock"])
        for arm, answers in arms.items():
            middle = {key: statistics.median(a[key] for a in answers) for key in ("T", "H", "Q", "E")}
            table.add_row(
                name,
                arm,
                f"{middle['T']:.3f}",
                f"{told[arm]['T'] / middle['T'] - 1:+.1%}",
                f"{middle['H']:.3f}",
                f"{told[arm]['H'] / middle['H'] - 1:+.1%}",
                f"{middle['Q']:.0f}",
                f"{middle['E']:.0f}",
                f"{middle['E'] / base:.3f}",
                f"{told[arm]['E'] / told['stock']['E']:.3f}",
            )
    if table.rows:
        console.print(table)
