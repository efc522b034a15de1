"""Measured decode step times: a table by EP size, batch and, where measured, context length.

The CSV has the columns ``ep``, ``batch_per_rank`` and ``decode_ms``; ``rank1_idle`` (1: measured while another rank of
the world had no requests and ran dummy steps) and ``context_tokens`` (mean tokens of prompt and response a request)
are optional. Between measured batches and contexts time is interpolated linearly, between measured EP sizes linearly in
log2(EP). What lies outside of the table is refused, or, when asked for, extrapolated and labelled so:

    seconds(EP, B) = c0 + c1 * log2(EP) + c2 * A(EP, B) / EP + c3 * B,    A = X * (1 - (1 - k/X) ** (EP * B))

A is the expected number of distinct experts of X that EP * B tokens with top-k routing reach, so A / EP is what one
rank reads; c1 stands for the latency of dispatch and combine. The four terms are fitted to the table (least squares,
none negative) and scale the curve of the nearest measured size, so that they only say how sizes differ.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexfloor.errors import InputError

Floats = NDArray[np.float64]
Source = Literal["measured", "interpolated", "extrapolated"]

COLUMNS = {"ep": "ep", "batch_per_rank": "batch", "batch": "batch", "decode_ms": "ms", "rank1_idle": "idle"}
_OPTIONAL = {"context_tokens": "context"}
REMEDY = "the columns are ep, batch_per_rank, decode_ms and, optional, rank1_idle, context_tokens"
ACTIVE_EXPERTS = 8
"""Experts a token is routed to (top-k) where nobody says otherwise."""


class Row(NamedTuple):
    """One measurement: EP size, batch a rank, seconds, whether some rank was idle, mean context (tokens)."""

    ep: int
    batch: int
    seconds: float
    idle: bool = False
    context: float = 0.0


@dataclass(frozen=True)
class Knots:
    """A piecewise linear function; constant before its first knot, its last slope (never falling) goes on behind."""

    x: Floats
    y: Floats

    def at(self, value: float) -> float:
        """The function at one point."""
        if value <= self.x[-1] or len(self.x) == 1:
            return float(np.interp(value, self.x, self.y))
        slope = max(0.0, float((self.y[-1] - self.y[-2]) / (self.x[-1] - self.x[-2])))
        return float(self.y[-1] + slope * (value - self.x[-1]))


@dataclass
class Curve:
    """Decode step times of one EP size.

    Attributes:
        ep: the EP size.
        source: how they came about.
        largest: largest batch of the table.
        extrapolate: whether larger batches are answered (linearly) instead of refused.
        contexts: mean contexts that were measured, tokens, ascending; one entry where there is no such axis.
    """

    ep: int
    source: Source
    largest: int
    extrapolate: bool
    contexts: Floats
    _by_context: list[Knots]
    _idle: Knots
    _factor: Knots
    _known: dict[tuple[float, bool], Floats] = field(default_factory=dict)

    def seconds(self, batch: float, *, idle: bool = False, context: float = 0.0) -> float:
        """Seconds of one decode step.

        Args:
            batch: batch that the step is charged for, requests a rank.
            idle: whether a rank of the world has no requests and runs a dummy step.
            context: mean tokens of prompt and response a request; read where the table has that axis.

        Raises:
            InputError: the batch lies above the table and extrapolation is not allowed.
        """
        values = self._values(batch, idle)
        return float(values[0]) if len(values) == 1 else Knots(self.contexts, values).at(context)

    def seconds_over(self, batch: float, contexts: Floats, *, idle: bool = False) -> Floats:
        """As `seconds` for an array of contexts."""
        values = self._values(batch, idle)
        if len(values) == 1:
            return np.full(len(contexts), values[0])
        inside = np.interp(contexts, self.contexts, values)
        slope = max(0.0, (values[-1] - values[-2]) / (self.contexts[-1] - self.contexts[-2]))
        return np.asarray(inside + slope * np.maximum(0.0, contexts - self.contexts[-1]))

    def _values(self, batch: float, idle: bool) -> Floats:
        known = self._known.get((batch, idle))
        if known is not None:
            return known
        if batch > self.largest and not self.extrapolate:
            what = f"has no batch above {self.largest} for EP {self.ep}, {batch:g} is asked for; measure it"
            raise InputError(f"{what} or allow extrapolation", field="batch_per_rank")
        factor = self._factor.at(batch) * (self._idle.at(batch) if idle else 1.0)
        values = np.array([knots.at(batch) for knots in self._by_context]) * factor
        self._known[batch, idle] = values
        return values


class StepTimes:
    """A table of decode step times.

    Args:
        rows: measurements; at least one, each (ep, batch, idle, context) once, some of them without an idle rank.
        file: where they came from, for messages.
    """

    def __init__(self, rows: Iterable[Row], file: str | Path | None = None) -> None:
        self.rows = tuple(sorted(rows, key=lambda row: (row.ep, row.idle, row.context, row.batch)))
        self.file = file
        self.sizes = tuple(sorted({row.ep for row in self.rows if not row.idle}))
        contexts = {row.context for row in self.rows if not row.idle}
        self.has_context = len(contexts) > 1
        if not self.sizes:
            raise InputError("holds no step time of a world whose ranks are all busy", file=file, field="rank1_idle")

    @classmethod
    def load(cls, path: str | Path) -> StepTimes:
        """Reads a CSV; lines that begin with # are skipped.

        Raises:
            InputError: missing, empty or malformed file; names file, line and field.
        """
        return cls(_read(path), path)

    @classmethod
    def constant(cls, seconds: float, sizes: Sequence[int] = (1,)) -> StepTimes:
        """One step time for every size and batch."""
        return cls([Row(ep, batch, seconds) for ep in sizes for batch in (1, 1 << 30)])

    def save(self, path: str | Path, comment: Sequence[str] = ()) -> None:
        """Writes the table as CSV.

        Raises:
            InputError: the file cannot be written.
        """
        heads = ["ep", "rank1_idle", "batch_per_rank", *(["context_tokens"] if self.has_context else []), "decode_ms"]
        try:
            with Path(path).open("w", encoding="utf-8", newline="") as file:
                file.writelines(f"# {line}\n" for line in comment)
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(heads)
                for row in self.rows:
                    context = [f"{row.context:g}"] if self.has_context else []
                    writer.writerow([row.ep, int(row.idle), row.batch, *context, f"{row.seconds * 1e3:.6g}"])
        except OSError as error:
            raise InputError(f"cannot be written ({error.strerror}); name a writable place", file=path) from error

    def scaled(self, factor: float) -> StepTimes:
        """The same table with every time multiplied."""
        return StepTimes([row._replace(seconds=row.seconds * factor) for row in self.rows], self.file)

    def source(self, ep: int) -> Source:
        """How times of an EP size come about."""
        if ep in self.sizes:
            return "measured"
        return "interpolated" if self.sizes[0] < ep < self.sizes[-1] else "extrapolated"

    def curve(
        self, ep: int, *, extrapolate: bool = False, experts: int | None = None, top_k: int = ACTIVE_EXPERTS
    ) -> Curve:
        """Step times of one EP size.

        Args:
            ep: the EP size.
            extrapolate: whether sizes and batches outside of the table are answered; see the module for the model.
            experts: experts X of a layer, needed to extrapolate to another EP size.
            top_k: experts a token is routed to.

        Raises:
            InputError: the size lies outside of the table and extrapolation is not allowed or not possible.
        """
        source = self.source(ep)
        if source == "measured":
            return self._measured(ep, ep, source, Knots(np.array([1.0]), np.array([1.0])), extrapolate)
        if source == "interpolated":
            return self._between(ep, extrapolate)
        if not extrapolate:
            sizes = ", ".join(map(str, self.sizes))
            what = f"has no step times for EP {ep} (it has EP {sizes}); measure them or allow extrapolation"
            raise InputError(what, file=self.file, field="ep")
        nearest = self.sizes[0] if ep < self.sizes[0] else self.sizes[-1]
        model = self._model(experts, top_k)
        batches = sorted({row.batch for row in self.rows if row.ep == nearest})
        base = self._measured(ep, nearest, source, Knots(np.array([1.0]), np.array([1.0])), extrapolate)
        known = np.array([base.seconds(batch) for batch in batches])
        wanted = known * np.array([model(ep, batch) / model(nearest, batch) for batch in batches])
        never_falling = np.maximum.accumulate(wanted) / known
        factor = _knots(list(zip(batches, never_falling.tolist(), strict=True)), rising=False)
        return self._measured(ep, nearest, source, factor, extrapolate)

    def _measured(self, ep: int, of: int, source: Source, factor: Knots, extrapolate: bool) -> Curve:
        own = [row for row in self.rows if row.ep == of and not row.idle]
        contexts = sorted({row.context for row in own})
        by_context = [_knots([(r.batch, r.seconds) for r in own if r.context == context]) for context in contexts]
        busy = by_context[0]
        idle = [(r.batch, r.seconds / busy.at(r.batch)) for r in self.rows if r.ep == of and r.idle]
        return Curve(
            ep,
            source,
            max(row.batch for row in own),
            extrapolate,
            np.array(contexts, dtype=float),
            by_context,
            _knots(idle or [(1, 1.0)], rising=False),
            factor,
        )

    def _between(self, ep: int, extrapolate: bool) -> Curve:
        below = max(size for size in self.sizes if size < ep)
        above = min(size for size in self.sizes if size > ep)
        low, high = self.curve(below, extrapolate=True), self.curve(above, extrapolate=True)
        share = math.log2(ep / below) / math.log2(above / below)
        batches = sorted({row.batch for row in self.rows if row.ep in (below, above)})
        ratios = [1 - share + share * high.seconds(batch) / low.seconds(batch) for batch in batches]
        factor = _knots(list(zip(batches, ratios, strict=True)), rising=False)
        curve = self._measured(ep, below, "interpolated", factor, extrapolate)
        curve.largest = max(low.largest, high.largest)
        return curve

    def _model(self, experts: int | None, top_k: int) -> _SizeModel:
        if len(self.sizes) < 2 or experts is None:
            lacks = "one EP size only" if len(self.sizes) < 2 else "no num_experts in the configuration"
            what = f"cannot be extrapolated to other EP sizes: {lacks}; measure them"
            raise InputError(what, file=self.file, field="ep")
        first = min(row.context for row in self.rows if not row.idle)
        used = [row for row in self.rows if not row.idle and row.context == first]
        terms = np.array([_terms(row.ep, row.batch, experts, top_k) for row in used])
        return _SizeModel(_fit(terms, np.array([row.seconds for row in used])), experts, top_k)


@dataclass(frozen=True)
class _SizeModel:
    weights: Floats
    experts: int
    top_k: int

    def __call__(self, ep: int, batch: int) -> float:
        return float(np.array(_terms(ep, batch, self.experts, self.top_k)) @ self.weights)


def _terms(ep: int, batch: int, experts: int, top_k: int) -> list[float]:
    reached = experts * (1 - (1 - min(1.0, top_k / experts)) ** (ep * batch))
    return [1.0, math.log2(ep), reached / ep, float(batch)]


def _fit(terms: Floats, seconds: Floats) -> Floats:
    """Least squares of relative errors with weights of at least 0: the best of all sets of terms left out."""
    relative = terms / seconds[:, None]
    best, found = math.inf, np.zeros(terms.shape[1])
    columns = range(terms.shape[1])
    for count in range(1, len(columns) + 1):
        for kept in combinations(columns, count):
            solved = np.linalg.lstsq(relative[:, kept], np.ones(len(seconds)), rcond=None)[0]
            error = float(np.sum((relative[:, kept] @ solved - 1) ** 2))
            if np.all(solved >= 0) and error < best:
                best, found = error, np.zeros(len(columns))
                found[list(kept)] = solved
    return found


def _knots(points: Sequence[tuple[float, float]], *, rising: bool = True) -> Knots:
    x, y = (np.array(axis, dtype=float) for axis in zip(*sorted(points), strict=True))
    return Knots(x, y) if rising or len(x) == 1 else Knots(np.append(x, x[-1] + 1), np.append(y, y[-1]))


def _read(path: str | Path) -> list[Row]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"cannot be read ({reason}); name a CSV of step times", file=path) from error
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not numbered:
        raise InputError(f"is empty; {REMEDY}", file=path)
    heads = [head.strip() for head in numbered[0][1].split(",")]
    names = [(COLUMNS | _OPTIONAL).get(head) for head in heads]
    if None in names or not {"ep", "batch", "ms"} <= set(names):
        raise InputError(f"has the columns {', '.join(heads)}; {REMEDY}", file=path, line=numbered[0][0])
    rows: dict[tuple[int, int, bool, float], int] = {}
    found: list[Row] = []
    for number, line in numbered[1:]:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(heads):
            raise InputError(f"has {len(cells)} cells, the head has {len(heads)}", file=path, line=number)
        by_name = {str(name): (head, cell) for name, head, cell in zip(names, heads, cells, strict=True)}
        row = Row(
            ep=_whole(*by_name["ep"], path, number),
            batch=_whole(*by_name["batch"], path, number),
            seconds=_positive(*by_name["ms"], path, number) / 1e3,
            idle=bool(_whole(*by_name["idle"], path, number, low=0, high=1)) if "idle" in by_name else False,
            context=_positive(*by_name["context"], path, number) if "context" in by_name else 0.0,
        )
        key = (row.ep, row.batch, row.idle, row.context)
        if key in rows:
            raise InputError(f"EP {row.ep} batch {row.batch} stands in line {rows[key]} too", file=path, line=number)
        rows[key] = number
        found.append(row)
    if not found:
        raise InputError(f"holds no measurement; {REMEDY}", file=path)
    return found


def _whole(head: str, cell: str, path: str | Path, line: int, *, low: int = 1, high: int | None = None) -> int:
    if not cell.isascii() or not cell.isdigit() or int(cell) < low or (high is not None and int(cell) > high):
        wanted = f"a whole number of at least {low}" if high is None else f"{low} or {high}"
        raise InputError(f"must be {wanted}, got {cell!r:.40}", file=path, line=line, field=head)
    return int(cell)


def _positive(head: str, cell: str, path: str | Path, line: int) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"must be a positive number, got {cell!r:.40}", file=path, line=line, field=head)
    return value
