"""The names of events, and the fields that each of them has or may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Check = Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_span(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(_is_count(item) for item in value)


def _is_expected(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(str(key).isdigit() and _is_count(item) for key, item in value.items())
    return _is_count(value) or _is_counts(value)


def _is_cap_hits(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_count(value.get(key)) for key in ("short", "global"))


KINDS: Mapping[str, tuple[Check, str]] = {
    "count": (_is_count, "a whole number of at least 0"),
    "span": (_is_span, "a finite number of at least 0"),
    "number": (_is_number, "a finite number"),
    "text": (_is_text, "a string"),
    "counts": (_is_counts, "a list of whole numbers of at least 0"),
    "expected": (_is_expected, "a list of counts, one a rank, or a map of rank to count, or this rank's count"),
    "cap_hits": (_is_cap_hits, 'an object with whole numbers "short" and "global"'),
}


class EventSpec(NamedTuple):
    """Fields of one event name, each mapped to a kind in ``KINDS``; fields that are not named are kept unchecked."""

    required: Mapping[str, str] = {}
    optional: Mapping[str, str] = {}


PARTS = ("agree", "prepare", "channel", "move", "groups", "switch", "capture", "trial", "vote", "first_step")
_LASTED = {"duration": "span", "duration_res": "span"}

EVENT_NAMES: Mapping[str, EventSpec] = {
    "rollout_start": EventSpec({}, {"world_size": "count"}),
    "rollout_end": EventSpec(
        {"response_tokens": "count", "world_size": "count"}, {"responses": "count", "cap_hits": "cap_hits"}
    ),
    "plan_installed": EventSpec({"ladder": "counts"}, {"expected": "expected", "kv_tokens": "count", "rows": "count"}),
    "generation_end": EventSpec(),
    "local_complete": EventSpec(),
    # One a transition and replica, with PARTS in seconds. Where several ranks state the same commit, the ledger takes
    # the longest of each part and the sum of moved_bytes: each rank states its own.
    "stage_commit": EventSpec(
        {"from": "count", "to": "count"},
        {
            "stage": "count",
            "survivors": "counts",
            "moved_bytes": "count",
            "iterations": "count",
            **dict.fromkeys(PARTS, "span"),
        },
    ),
    # Planned residency: worlds made ready after rollout_start and before the first token (elastic/rehearsal.py).
    "rehearsal": EventSpec(
        {}, {"seconds": "span", "moved_rows": "count", "moved_bytes": "count", "captured": "counts"}
    ),
    "detach_start": EventSpec(),
    "detach_end": EventSpec(),
    "sleep_start": EventSpec({}, {"tag": "text"}),
    "sleep_end": EventSpec({}, {"tag": "text", "released_bytes": "count"}),
    "restore_start": EventSpec(),
    "restore_end": EventSpec({}, _LASTED),
    "wake_start": EventSpec({}, {"tag": "text"}),
    "wake_end": EventSpec({}, {"tag": "text", "kv_tokens": "count", "floor": "count", **_LASTED}),
    "capture_end": EventSpec({}, {"sizes": "counts", "seconds": "span"}),
    "capture_release": EventSpec(),
    # Counts since the rank's previous audit; a leaver states its own before detach_end.
    # graphs: 1 where the engine has captured decode graphs, so that an eager step is a fallback.
    "decode_audit": EventSpec({"full": "count", "eager": "count"}, {"prefill": "count", "graphs": "count"}),
    "dummy_steps": EventSpec({"count": "count", "seconds": "span"}),
    "active_batch": EventSpec({"sizes": "counts"}),
    "preemption": EventSpec({}, {"recomputed_tokens": "count"}),
    "plan_skipped": EventSpec({}, {"stage": "count", "reason": "text"}),
    "sidecar_start": EventSpec(),
    "sidecar_ready": EventSpec(),
    "sidecar_stop": EventSpec(),
    "sidecar_exit": EventSpec(),
    "sidecar_ack": EventSpec(),
    "weights_loaded": EventSpec(),
    "fault": EventSpec({}, {"where": "text", "what": "text"}),
}
