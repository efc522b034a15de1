"""Which responses would be generated: true lengths by epoch, from a file or drawn from length distributions.

Drawn lengths follow a Gaussian copula: response j of item i in epoch e has the normal score
``z = sqrt(c) * u_i + sqrt(1 - c) * v_ije`` with independent standard normal u and v, and the length at the quantile
``Phi(z)`` of the distribution. So every response has exactly that distribution, and two responses of one item, of the
same epoch or of another one, have normal scores of correlation c. With growth g the responses of an item scatter the
more the longer it is, ``z = sqrt(c) * u_i + sqrt(1 - c) * exp(g * u_i) * v_ije``: a spread that is log-linear in the
item's own score. The length is then the quantile at F(z), F the distribution function of z itself, so every response
keeps the distribution. Two kinds of surprise can be put on top, each for a share of the responses: strays, whose length
has nothing to do with their item, and runaways, which only a limit stops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexfloor.errors import InputError
from flexfloor.history import Observation

COLUMNS = ["output_tokens", "probability"]
ENDLESS = 1 << 20
"""Tokens of a response that does not stop by itself."""
_MOST_GROWTH = 4.0
_FARTHEST, _WIDEST = 6.0, 12.0
"""Farthest score of an item that the distribution function is averaged over; asinh of four times the largest score."""


@dataclass(frozen=True)
class EpochLengths:
    """What one epoch would generate without any cap.

    Attributes:
        epoch: its number.
        items: item ids in dataset order.
        lengths: true response lengths by item, tokens.
        prompt_tokens: prompt length by item, tokens.
    """

    epoch: int
    items: tuple[str, ...]
    lengths: dict[str, tuple[int, ...]]
    prompt_tokens: dict[str, int]

    def observations(self, limit: int) -> list[Observation]:
        """What a rollout with this global limit and no other cap observes."""
        return [
            Observation(item, self.epoch, self.prompt_tokens[item], tuple(min(n, limit) for n in self.lengths[item]))
            for item in self.items
        ]


@dataclass(frozen=True)
class Workload:
    """Epochs in order; the first is the bootstrap that predictions come from.

    Attributes:
        epochs: at least two, ascending.
        notes: what is assumed about the lengths.
    """

    epochs: tuple[EpochLengths, ...]
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """True tokens of all epochs."""
        return sum(n for epoch in self.epochs for own in epoch.lengths.values() for n in own)


@dataclass(frozen=True)
class Distribution:
    """A distribution of response lengths.

    Attributes:
        tokens: support, tokens, ascending.
        cumulative: probability up to and including each of them; the last is 1.
    """

    tokens: NDArray[np.int64]
    cumulative: NDArray[np.float64]

    def quantiles(self, shares: NDArray[np.float64]) -> NDArray[np.int64]:
        """Lengths at cumulative probabilities."""
        at = np.searchsorted(self.cumulative, shares, side="left")
        return np.asarray(self.tokens[np.minimum(at, len(self.tokens) - 1)])


def from_observations(
    observations: Sequence[Observation], *, file: str | Path | None = None, noise: float = 0.0, seed: int = 0
) -> Workload:
    """The epochs of a lengths file; one epoch alone is used as its own future.

    Args:
        observations: as read from lengths.jsonl.
        file: where they came from, for messages.
        noise: standard deviation of the logarithm of a random factor on every response of that future.
        seed: of that noise.
    """
    notes: list[str] = []
    by_epoch: dict[int, list[Observation]] = {}
    for seen in observations:
        by_epoch.setdefault(seen.epoch, []).append(seen)
    epochs = [_epoch(number, by_epoch[number]) for number in sorted(by_epoch)]
    censored = sum(len(seen.censored) for seen in observations)
    if censored:
        notes.append(f"{censored} responses were stopped by a cap in the file; their observed length is taken as true")
    if len(epochs) == 1:
        epochs.append(_future(epochs[0], noise, seed))
        told = f"each response times a log-normal factor of sd {noise:g}" if noise else "predicted without any error"
        notes.append(f"the lengths hold one epoch: the next one repeats it, {told}")
    elif noise:
        raise InputError("noise is for a file of one epoch; this one holds several", file=file, field="--noise")
    return Workload(tuple(epochs), tuple(notes))


def _epoch(number: int, seen: Sequence[Observation]) -> EpochLengths:
    return EpochLengths(
        number,
        tuple(one.item_id for one in seen),
        {one.item_id: one.lengths for one in seen},
        {one.item_id: one.prompt_tokens for one in seen},
    )


def _future(epoch: EpochLengths, noise: float, seed: int) -> EpochLengths:
    random = np.random.default_rng(seed)
    lengths = {
        item: tuple(max(1, round(n * math.exp(noise * random.standard_normal()))) for n in own) if noise else own
        for item, own in epoch.lengths.items()
    }
    return EpochLengths(epoch.epoch + 1, epoch.items, lengths, epoch.prompt_tokens)


def drawn(
    parts: Sequence[tuple[Distribution, float]],
    *,
    items: int,
    responses: int,
    epochs: int,
    correlation: float,
    prompt_tokens: int,
    seed: int,
    scale: float = 1.0,
    runaways: float = 0.0,
    strays: float = 0.0,
    growth: float = 0.0,
) -> Workload:
    """Lengths from a mixture of distributions; the same arguments give the same lengths.

    Args:
        parts: distributions and their weights.
        items: items of the dataset.
        responses: responses an item and epoch.
        epochs: epochs after the bootstrap.
        correlation: c of the copula, 0 to 1.
        prompt_tokens: of every prompt.
        seed: of the draw.
        scale: factor on every length.
        runaways: share of the responses, any item's, that only a limit stops.
        strays: share of the responses that are drawn without regard to their item.
        growth: g, how fast the spread within an item grows with the item's score, at least 0.
    """
    if not 0 <= correlation <= 1:
        raise InputError(f"must lie between 0 and 1, got {correlation:g}", field="--correlation")
    if not 0 <= growth <= _MOST_GROWTH:
        raise InputError(f"must lie between 0 and {_MOST_GROWTH:g}, got {growth:g}", field="--growth")
    mixed = mixture(parts)
    random = np.random.default_rng(seed)
    own = random.standard_normal(items)
    made = []
    width = len(str(items - 1))
    names = tuple(f"item{index:0{width}d}" for index in range(items))
    for epoch in range(epochs + 1):
        rest = random.standard_normal((items, responses))
        if growth:
            rest *= np.exp(growth * own)[:, None]
        scores = math.sqrt(correlation) * own[:, None] + math.sqrt(1 - correlation) * rest
        shares = np.interp(scores, *_score_cdf(correlation, growth)) if growth else _normal_cdf(scores)
        if strays:
            chosen = random.random(scores.shape) < strays
            shares[chosen] = _normal_cdf(random.standard_normal(int(chosen.sum())))
        lengths = np.maximum(1, np.rint(scale * mixed.quantiles(shares))).astype(int)
        if runaways:
            lengths[random.random(lengths.shape) < runaways] = ENDLESS
        made.append(
            EpochLengths(
                epoch,
                names,
                {name: tuple(row) for name, row in zip(names, lengths.tolist(), strict=True)},
                dict.fromkeys(names, prompt_tokens),
            )
        )
    note = f"{items} items x {responses} responses drawn with seed {seed}, same-item correlation {correlation:g}"
    note += f" (normal scores), prompts of {prompt_tokens} tokens" + (f", lengths x {scale:g}" if scale != 1 else "")
    note += f", spread within an item growing by exp({growth:g} u)" if growth else ""
    note += f", {runaways:.2%} of the responses stopped by a limit only" if runaways else ""
    note += f", {strays:.2%} of the responses drawn without regard to their item" if strays else ""
    return Workload(tuple(made), (note,))


def _normal_cdf(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([0.5 * (1 + math.erf(z / math.sqrt(2))) for z in scores.ravel()]).reshape(scores.shape)


@lru_cache(maxsize=8)
def _score_cdf(correlation: float, growth: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distribution function of z: scores, ascending, and the share of responses up to each.

    The normal distribution of v at ``(z - sqrt(c) * u) / (sqrt(1 - c) * exp(g * u))``, averaged over u on an even grid.
    """
    own = np.linspace(-_FARTHEST, _FARTHEST, 8001)
    weights = np.exp(-own * own / 2)
    weights /= weights.sum()
    at = np.linspace(-9.0, 9.0, 18001)
    normal = _normal_cdf(at)
    spread = np.maximum(math.sqrt(1 - correlation) * np.exp(growth * own), 1e-9)
    scores = np.sinh(np.linspace(-_WIDEST, _WIDEST, 2401)) / 4
    shares = np.array([weights @ np.interp((z - math.sqrt(correlation) * own) / spread, at, normal) for z in scores])
    return scores, np.maximum.accumulate(shares)


def mixture(parts: Sequence[tuple[Distribution, float]]) -> Distribution:
    """One distribution from several and their weights (any positive sum)."""
    total = math.fsum(weight for _, weight in parts)
    tokens = np.unique(np.concatenate([part.tokens for part, _ in parts]))
    mass = np.zeros(len(tokens))
    for part, weight in parts:
        mass[np.searchsorted(tokens, part.tokens)] += np.diff(part.cumulative, prepend=0.0) * weight / total
    cumulative = np.cumsum(mass)
    return Distribution(tokens, cumulative / cumulative[-1])


def read_distribution(path: str | Path) -> Distribution:
    """Reads a CSV with the columns output_tokens and probability.

    Raises:
        InputError: missing, empty or malformed file; names file, line and field.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"cannot be read ({reason}); name a CSV of output lengths", file=path) from error
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    heads = [head.strip() for head in numbered[0][1].split(",")] if numbered else []
    if heads != COLUMNS or len(numbered) < 2:
        line = numbered[0][0] if numbered else None
        raise InputError(f"needs the columns {', '.join(COLUMNS)} and at least one line", file=path, line=line)
    mass: dict[int, float] = {}
    for number, text in numbered[1:]:
        cells = [cell.strip() for cell in text.split(",")]
        if len(cells) != len(COLUMNS):
            raise InputError(f"has {len(cells)} cells, expected {len(COLUMNS)}", file=path, line=number)
        if not cells[0].isascii() or not cells[0].isdigit() or int(cells[0]) < 1:
            what = f"must be a whole number of at least 1, got {cells[0]!r:.40}"
            raise InputError(what, file=path, line=number, field=COLUMNS[0])
        try:
            share = float(cells[1])
        except ValueError:
            share = math.nan
        if not (math.isfinite(share) and share >= 0):
            what = f"must be a number of at least 0, got {cells[1]!r:.40}"
            raise InputError(what, file=path, line=number, field=COLUMNS[1])
        mass[int(cells[0])] = mass.get(int(cells[0]), 0.0) + share
    total = math.fsum(mass.values())
    if total <= 0:
        raise InputError("sum to 0; give at least one length a probability", file=path, field=COLUMNS[1])
    tokens = sorted(mass)
    cumulative = np.cumsum([mass[length] for length in tokens])
    return Distribution(np.array(tokens, dtype=np.int64), cumulative / cumulative[-1])
