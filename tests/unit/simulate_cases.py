"""Small worlds for the tests of the simulator."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from flexfloor.events import Event, EventLog
from flexfloor.ledger import RunLedger, account
from flexfloor.simulate import Limits, Request, StepInput
from flexfloor.simulate.records import StepOutcome
from flexfloor.step_times import Row, StepTimes

ITEMS = 4


@st.composite
def requests(draw, most: int = 8, longest: int = 14) -> tuple[Request, ...]:
    """The requests of one rank; an item has one prompt length."""
    prompts = [3, 7, 1, 8]
    items = draw(st.lists(st.integers(0, ITEMS - 1), max_size=most))
    return tuple(Request(f"i{i}", prompts[i], draw(st.integers(1, longest))) for i in items)


@st.composite
def limits(draw, groups: Sequence[Sequence[Request]]) -> Limits:
    """Limits under which every request fits alone; often so tight that requests are preempted."""
    block = draw(st.sampled_from([1, 2, 4]))
    need = max((-(-(r.prompt_tokens + r.length - 1) // block) for group in groups for r in group), default=1)
    blocks = draw(st.one_of(st.none(), st.integers(need, need + 8)))
    return Limits(draw(st.integers(1, 6)), blocks, block, draw(st.sampled_from([3, 8, 100])), draw(st.booleans()))


@st.composite
def tables(draw, sizes: Sequence[int], *, context: bool = False, same: bool = False) -> StepTimes:
    """Step times that never fall in the batch; ``same`` for all EP sizes, or some for idle ranks too."""
    rows: list[Row] = []
    contexts = (10.0, 40.0) if context else (0.0,)
    first: list[Row] = []
    for ep in sizes:
        own = [row._replace(ep=ep) for row in first]
        for at in contexts if not own else ():
            rising = sorted(draw(st.lists(st.floats(0.001, 0.05), min_size=3, max_size=3)))
            own += [Row(ep, batch, t, False, at) for batch, t in zip((1, 4, 16), rising, strict=True)]
        if not same and ep > 1 and draw(st.booleans()):
            own.append(Row(ep, 4, draw(st.floats(0.001, 0.05)), True, contexts[0]))
        first = own if same else []
        rows += own
    return StepTimes(rows)


def step(
    groups: Sequence[Sequence[Request]],
    ladder: Sequence[int] = (),
    *,
    bounds: Limits | None = None,
    captures: Sequence[int] = (),
    experts: int = 16,
    residency: str = "natural",
) -> StepInput:
    """A step of these groups; without a ladder it keeps the full world."""
    sizes = tuple(ladder) or (len(groups),)
    return StepInput(
        groups=tuple(tuple(group) for group in groups),
        ladder=sizes,
        residency=residency,
        rank_order=tuple(range(len(groups))),
        capture_sizes=tuple(captures),
        limits=bounds or Limits(),
        experts=experts,
        capacity=experts // sizes[-1],
    )


def lengths_of(*ranks: Sequence[int]) -> tuple[tuple[Request, ...], ...]:
    """Groups of requests with prompts of one token."""
    return tuple(tuple(Request(f"r{r}.{i}", 1, n) for i, n in enumerate(own)) for r, own in enumerate(ranks))


def ledger_of(given: StepInput, outcome: StepOutcome) -> RunLedger:
    """The ledger's account of one simulated step."""
    head = {"run": "r", "epoch": 0, "step": 0}
    events = [Event(t=m.t, event=m.event, rank=m.rank, fields=m.fields, **head) for m in outcome.marks]
    count = sum(map(len, given.groups))
    fields = {"response_tokens": outcome.tokens, "world_size": len(given.groups), "responses": count}
    return account(EventLog([*events, Event(t=outcome.seconds, event="rollout_end", fields=fields, **head)], []))
