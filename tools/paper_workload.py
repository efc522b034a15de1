"""Fits the workload that stands in for the paper's lengths, from published length statistics alone.

    python tools/paper_workload.py --pmf CLIENT.csv --pmf POOLED.csv --out docs/results/paper-workload.json

Lengths are a mixture of two public distributions of reasoning traffic, times a factor. Weight and factor are the two
unknowns; the mean length and the share of responses at the 16,384-token cap are the two equations. The same-prompt
correlation is not published. It is assumed (0.6), varied (0.4 to 0.8), and in further cases derived from what
appendix E says about lengths under caps:

    concentrated  at most 24 of 616 responses at a limit lie outside of the longest predicted fifth of the prompts
    four_caps     four steps of five have a TailGuard cap below the global limit (12,288 of 15,360 responses)
    runaways      as four_caps, and 24 of 12,288 responses reach the cap of a step that is predicted to be short:
                  that share of all responses, whatever their prompt, is stopped by a limit only
    strays        as four_caps, and the same 24 of 12,288 come from responses whose length has nothing to do with their
                  prompt. Unlike runaways most of them end before the global limit, as the paper's do: it counts 591
                  responses there without guard and 592 with it

In all of these the responses of every prompt scatter alike, short or long. Two more cases let the scatter grow with the
prompt's own length (`growth` of `flexfloor.simulate.workload`), which leaves two unknowns, correlation and growth:

    spread        the correlation of LENGTHS within a prompt is 0.6, and the growth is the least one at which at most 24
                  of 616 responses at a limit lie outside of the longest predicted fifth, predictions under guard
    spread_caps   the same correlation of lengths, and the least growth at which also four steps of five have a cap
                  below the global limit, as in four_caps

The share of responses that reach a short cap (24 of 12,288) is left over as a check. Cells of the form "spread" vary
the correlation of lengths and the share at the cap at the growth of `spread`.

No method is run here: the file that this writes is what `tools/paper_table.py` reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from flexfloor.simulate import drawn, read_distribution
from flexfloor.simulate.workload import Distribution

CAP = 16384
MEAN = 6019.4
"""Mean response length of the verl baseline, tokens (seed 001, table 8)."""
CAP_SHARE = 591 / 15360
"""Responses at the global limit without guard (seed 001, appendix E)."""
OUTSIDE = 24 / 616
"""At most this part of the responses at a limit is not of the longest predicted fifth (appendix E)."""
RUNAWAYS = 24 / 12288
"""Responses that reach a short cap (appendix E)."""
CORRELATION = 0.6
CORRELATIONS = (0.4, 0.5, 0.6, 0.7, 0.8)
CAP_SHARES = (0.03, 0.05, 0.07)
ITEMS, RESPONSES, EPOCHS, SEEDS = 160, 16, 2, (0, 1, 2, 3, 4)
PROMPT_TOKENS = 256
ALPHA, QUANTILE, ROUNDING, LEAST_CAP, STEPS = 0.3, 0.95, 512, 4096, 5
"""Prediction and TailGuard of the paper (section 5.1)."""
FITTING_SEEDS = range(1000, 1040)
ORIGIN = "ServeGen (alibaba/ServeGen), output lengths of DeepSeek-R1 production traffic; Apache-2.0"

Parts = tuple[Distribution, Distribution]


def moments(part: Distribution, scale: float) -> tuple[float, float]:
    """Mean of the capped length and share at the cap, of one distribution times ``scale``."""
    mass = np.diff(part.cumulative, prepend=0.0)
    lengths = np.maximum(1, np.rint(scale * part.tokens))
    return float(mass @ np.minimum(lengths, CAP)), float(mass[lengths >= CAP].sum())


def fitted(parts: Parts, mean: float, share: float) -> dict[str, float]:
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


def lengths_of(parts: Parts, fit: Mapping[str, float], correlation: float, seed: int) -> list[NDArray[np.float64]]:
    """Capped lengths of the epochs, the bootstrap first, each of shape (items, responses)."""
    work = drawn(
        [(parts[0], fit["weight"]), (parts[1], 1 - fit["weight"])],
        items=ITEMS,
        responses=RESPONSES,
        epochs=EPOCHS,
        correlation=correlation,
        prompt_tokens=PROMPT_TOKENS,
        seed=seed,
        scale=fit["scale"],
        runaways=fit.get("runaways", 0.0),
        strays=fit.get("strays", 0.0),
        growth=fit.get("growth", 0.0),
    )
    return [
        np.minimum(np.array([epoch.lengths[item] for item in epoch.items], dtype=float), CAP) for epoch in work.epochs
    ]


def figures_of(epochs: Sequence[NDArray[np.float64]], *, guarded: bool = False) -> dict[str, float]:
    """Length statistics of the epochs after the bootstrap, their mean.

    ``outside``: share of the responses at the cap that are not of the longest predicted fifth; ``fourth_cap``: cap of
    equation 7 in the fourth step of five, before it is clipped to the global limit; ``short_hits``: share of the
    responses outside of the longest step that reach their step's cap. ``guarded``: predictions see lengths cut at caps.
    """
    tails, per_step = epochs[0].max(axis=1), ITEMS // STEPS
    predicted, rows = tails, []
    for lengths in epochs[1:]:
        tails, hits = lengths.max(axis=1), lengths >= CAP
        order = np.argsort(predicted, kind="stable")
        longest = order[-per_step:]
        rho = np.quantile(np.maximum(1, tails / predicted), QUANTILE, method="higher")
        caps = np.ceil(rho * predicted[order][per_step - 1 :: per_step] / ROUNDING) * ROUNDING
        cap_of = np.empty(ITEMS)
        cap_of[order] = np.repeat(np.clip(caps, LEAST_CAP, CAP), per_step)
        short = (lengths >= cap_of[:, None]) & (cap_of < CAP)[:, None]
        between, within = lengths.mean(axis=1).var(ddof=1), lengths.var(axis=1, ddof=1).mean()
        between -= within / RESPONSES
        rows.append(
            {
                "mean_tokens": lengths.mean(),
                "cap_share": hits.mean(),
                "length_correlation": between / (between + within),
                "outside": 1 - hits[longest].sum() / max(1, hits.sum()),
                "fourth_cap": caps[-2],
                "short_hits": short[order[:-per_step]].mean(),
            }
        )
        tails = np.minimum(tails, cap_of) if guarded else tails
        predicted = ALPHA * predicted + (1 - ALPHA) * tails
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def realised(parts: Parts, fit: Mapping[str, float], correlation: float, seeds: Iterable[int]) -> dict[str, float]:
    """Mean figures of the lengths as they are drawn."""
    guarded = "strays" in fit or "growth" in fit
    found = [figures_of(lengths_of(parts, fit, correlation, seed), guarded=guarded) for seed in seeds]
    return {name: round(float(np.mean([one[name] for one in found])), 6) for name in found[0]}


def smallest_correlation(parts: Parts, fit: Mapping[str, float], figure: str, limit: float) -> float:
    """The smallest correlation, in hundredths, at which a figure that falls with it is at most ``limit``."""
    low, high = 40, 99
    while low < high:
        middle = (low + high) // 2
        reached = realised(parts, fit, middle / 100, FITTING_SEEDS)[figure]
        low, high = (low, middle) if reached <= limit else (middle + 1, high)
    return low / 100


def with_strays(parts: Parts, base: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """Share of strays with the published hits of short caps, at the least correlation with four caps in most draws."""
    for correlation in (0.95, 0.96, 0.97, 0.98, 0.99):
        low, high = 0.0, 0.012
        while high - low > 1e-4:
            share = (low + high) / 2
            reached = realised(parts, {**base, "strays": share}, correlation, FITTING_SEEDS)["short_hits"]
            low, high = (share, high) if reached < RUNAWAYS else (low, share)
        fit = {**base, "strays": round(high, 4)}
        caps = [
            figures_of(lengths_of(parts, fit, correlation, seed), guarded=True)["fourth_cap"] for seed in FITTING_SEEDS
        ]
        if np.median(caps) <= CAP - ROUNDING:
            return fit, correlation
    raise SystemExit("no correlation up to 0.99 gives four caps with these strays")


def even_lengths(parts: Parts, fit: Mapping[str, float], wanted: float) -> float:
    """The correlation, in ten-thousandths, at which lengths within a prompt correlate by ``wanted``."""
    low, high = round(1e4 * wanted), 9999  # lengths correlate less than scores
    while low < high:
        middle = (low + high) // 2
        reached = realised(parts, fit, middle / 10000, FITTING_SEEDS)["length_correlation"]
        low, high = (middle + 1, high) if reached < wanted else (low, middle)
    return low / 10000


def least_growth(parts: Parts, base: Mapping[str, float], figure: str, limit: float) -> tuple[dict[str, float], float]:
    """The least growth, in hundredths, at which a figure is at most ``limit``, with the correlation of lengths kept."""
    low, high = 0, 400
    while low < high:
        middle = (low + high) // 2
        fit = {**base, "growth": middle / 100}
        reached = realised(parts, fit, even_lengths(parts, fit, CORRELATION), FITTING_SEEDS)[figure]
        low, high = (low, middle) if reached <= limit else (middle + 1, high)
    fit = {**base, "growth": low / 100}
    return fit, even_lengths(parts, fit, CORRELATION)


def spread_cases(parts: Parts, base: Mapping[str, float]) -> list[dict[str, object]]:
    """Both named cases of a growing spread, and the cells around the first of them."""
    cases: list[dict[str, object]] = []
    growth = 0.0
    for name, figure, limit in (
        ("spread", "outside", OUTSIDE),
        ("spread_caps", "fourth_cap", CAP - ROUNDING),
    ):
        fit, correlation = least_growth(parts, base, figure, limit)
        growth = growth or fit["growth"]
        case = {"name": name, "cap_share": round(CAP_SHARE, 5), "correlation": correlation, **fit}
        fitting = realised(parts, fit, correlation, FITTING_SEEDS)
        cases.append({**case, "fitting": fitting, "drawn": realised(parts, fit, correlation, SEEDS)})
    for share in (CAP_SHARE, *CAP_SHARES):
        fit = {**fitted(parts, MEAN, share), "growth": growth}
        for wanted in CORRELATIONS:
            correlation = even_lengths(parts, fit, wanted)
            case = {"form": "spread", "length_correlation": wanted, "cap_share": round(share, 5)}
            case |= {"correlation": correlation, **fit}
            cases.append({**case, "drawn": realised(parts, fit, correlation, SEEDS)})
    return cases


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
            drawn_figures = realised(parts, fit, correlation, SEEDS)
            cases.append({"cap_share": round(share, 5), "correlation": correlation, **fit, "drawn": drawn_figures})
    base = fitted(parts, MEAN, CAP_SHARE)
    rest = fitted(parts, (MEAN - RUNAWAYS * CAP) / (1 - RUNAWAYS), (CAP_SHARE - RUNAWAYS) / (1 - RUNAWAYS))
    for name, fit, figure, limit in (
        ("concentrated", base, "outside", OUTSIDE),
        ("four_caps", base, "fourth_cap", CAP - ROUNDING),
        ("runaways", rest | {"runaways": round(RUNAWAYS, 6)}, "fourth_cap", CAP - ROUNDING),
    ):
        correlation = smallest_correlation(parts, fit, figure, limit)
        case = {"name": name, "cap_share": round(CAP_SHARE, 5), "correlation": correlation, **fit}
        cases.append({**case, "drawn": realised(parts, fit, correlation, SEEDS)})
    strayed, correlation = with_strays(parts, base)
    case = {"name": "strays", "cap_share": round(CAP_SHARE, 5), "correlation": correlation, **strayed}
    cases.append({**case, "drawn": realised(parts, strayed, correlation, SEEDS)})
    cases += spread_cases(parts, base)
    written = {
        "schema": "flexfloor.paper-workload/1",
        "fitted_to": {
            "mean_tokens": MEAN,
            "cap_share": round(CAP_SHARE, 5),
            "source": "seed 001, table 8 (verl baseline) and appendix E; the base correlation is assumed",
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
    for case in cases:
        print(json.dumps(case))


if __name__ == "__main__":
    typer.run(main)
