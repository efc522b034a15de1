"""Fits the workload that stands in for the paper's lengths, from published length statistics alone.

    python tools/paper_workload.py --pmf CLIENT.csv --pmf POOLED.csv --out docs/results/paper-workload.json

Lengths are a mixture of two shared distributions of reasoning traffic, times a factor. Weight and factor are the two
unknowns; the mean length and the share of responses at the 16,384-token cap are the two equations. No method is run
here: the file that this writes is what `tools/paper_table.py` reads.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from flexfloor.simulate import drawn, read_distribution
from flexfloor.simulate.workload import Distribution

CAP = 16384
MEAN = 6019.4
"""Mean response length of the verl baseline, tokens (seed 001, table 8)."""
CAP_SHARE = 591 / 15360
"""Responses at the global limit without guard (seed 001, appendix E)."""
CORRELATION = 0.6
CORRELATIONS = (0.4, 0.5, 0.6, 0.7, 0.8)
CAP_SHARES = (0.03, 0.05, 0.07)
ITEMS, RESPONSES, EPOCHS, SEEDS = 160, 16, 2, (0, 1, 2, 3, 4)
PROMPT_TOKENS = 256
ORIGIN = "ServeGen (alibaba/ServeGen), output lengths of DeepSeek-R1 production traffic; Apache-2.0"


def moments(part: Distribution, scale: float) -> tuple[float, float]:
    """Mean of the capped length and share at the cap, of one distribution times ``scale``."""
    mass = np.diff(part.cumulative, prepend=0.0)
    lengths = np.maximum(1, np.rint(scale * part.tokens))
    return float(mass @ np.minimum(lengths, CAP)), float(mass[lengths >= CAP].sum())


def fitted(parts: tuple[Distribution, Distribution], mean: float, share: float) -> dict[str, float]:
    """Weight of the first distribution and factor on all lengths that give this mean and this share at the cap."""

    def weight_at(scale: float) -> float:
        first, second = (moments(part, scale)[0] for part in parts)
        return (mean - second) / (first - second)

    def miss(scale: float) -> float:
        weight = weight_at(scale)
        first, second = (moments(part, scale)[1] for part in parts)
        return weight * first + (1 - weight) * second - share

    low, high = 0.72, 1.3  # the share at the cap grows with the factor
    if not miss(low) < 0 < miss(high):
        raise SystemExit(f"no factor from {low} to {high} gives {share:.2%} at the cap")
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if miss(middle) < 0 else (low, middle)
    scale = (low + high) / 2
    weight = weight_at(scale)
    if not 0 <= weight <= 1:
        raise SystemExit(f"no mixture of these distributions has mean {mean:g} and {share:.2%} at the cap")
    return {"weight": round(weight, 5), "scale": round(scale, 5)}


def realised(parts: tuple[Distribution, Distribution], fit: dict[str, float], correlation: float) -> dict[str, Any]:
    """Figures of the lengths as they are drawn, all seeds and epochs; the correlation is that of capped lengths."""
    means, shares, related = [], [], []
    for seed in SEEDS:
        work = drawn(
            [(parts[0], fit["weight"]), (parts[1], 1 - fit["weight"])],
            items=ITEMS,
            responses=RESPONSES,
            epochs=EPOCHS,
            correlation=correlation,
            prompt_tokens=PROMPT_TOKENS,
            seed=seed,
            scale=fit["scale"],
        )
        for epoch in work.epochs[1:]:
            rows = np.minimum(np.array([epoch.lengths[item] for item in epoch.items], dtype=float), CAP)
            means.append(rows.mean())
            shares.append((rows >= CAP).mean())
            between, within = rows.mean(axis=1).var(ddof=1), rows.var(axis=1, ddof=1).mean()
            between -= within / RESPONSES
            related.append(between / (between + within))
    return {
        "mean_tokens": {"mean": round(float(np.mean(means)), 1), "sd": round(float(np.std(means, ddof=1)), 1)},
        "cap_share": {"mean": round(float(np.mean(shares)), 5), "sd": round(float(np.std(shares, ddof=1)), 5)},
        "length_correlation": round(float(np.mean(related)), 3),
    }


def main(
    pmf: Annotated[list[Path], typer.Option(help="Two CSVs output_tokens,probability; the first gets the weight.")],
    out: Annotated[Path, typer.Option(help="Where the parameters go.")],
) -> None:
    """Fit the workload."""
    if len(pmf) != 2:
        raise SystemExit("give --pmf twice")
    parts = (read_distribution(pmf[0]), read_distribution(pmf[1]))
    cases = []
    for share in (CAP_SHARE, *CAP_SHARES):
        fit = fitted(parts, MEAN, share)
        for correlation in CORRELATIONS:
            drawn_figures = realised(parts, fit, correlation)
            cases.append({"cap_share": round(share, 5), "correlation": correlation, **fit, "drawn": drawn_figures})
    written = {
        "schema": "flexfloor.paper-workload/1",
        "fitted_to": {
            "mean_tokens": MEAN,
            "cap_share": round(CAP_SHARE, 5),
            "source": "seed 001, table 8 (verl baseline) and appendix E; correlation assumed, not published",
        },
        "distributions": [
            {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "origin": ORIGIN}
            for path in pmf
        ],
        "cap": CAP,
        "items": ITEMS,
        "responses": RESPONSES,
        "epochs": EPOCHS,
        "seeds": list(SEEDS),
        "prompt_tokens": PROMPT_TOKENS,
        "base": {"cap_share": round(CAP_SHARE, 5), "correlation": CORRELATION},
        "cases": cases,
    }
    out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    base = next(c for c in cases if c["cap_share"] == round(CAP_SHARE, 5) and c["correlation"] == CORRELATION)
    print(json.dumps(base, indent=1))


if __name__ == "__main__":
    typer.run(main)
