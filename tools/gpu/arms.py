"""One rollout on a server of CUDA ranks: its requests, and what event log and responses say of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexfloor.driver.orders import Request, Response
from flexfloor.events import PARTS, read_events
from gpu.gaps import token_gap_ms


@dataclass(frozen=True)
class Load:
    """Requests of a rollout: ``lengths[rank]`` are response lengths, all prompts have ``prompt`` tokens."""

    lengths: tuple[tuple[int, ...], ...]
    prompt: int = 96
    temperature: float = 0.0
    vocabulary: int = 32000

    def requests(self) -> tuple[Request, ...]:
        """One request a length, rank by rank."""
        return tuple(
            Request(
                f"r{rank}.{i}",
                i,
                rank,
                tuple(5 + (1009 * rank + 31 * i + 7 * k * k + k) % (self.vocabulary - 10) for k in range(self.prompt)),
                length,
                1000 * rank + i,
                False,
            )
            for rank, row in enumerate(self.lengths)
            for i, length in enumerate(row)
        )


@dataclass
class Arm:
    """One rollout and what its event log says."""

    responses: Sequence[Response]
    events: list[dict[str, Any]]
    name: str = ""
    ladder: tuple[int, ...] = ()
    seconds: float = 0.0

    @classmethod
    def of(cls, folder: Path, responses: Sequence[Response], **told: Any) -> Arm:
        """Of the run folder with its events; ``told`` are further fields."""
        return cls(responses, [json.loads(e.to_json()) for e in read_events(folder).events], **told)

    def record(self, reference: Arm | None) -> dict[str, Any]:
        """The arm as plain values; compared with ``reference``."""
        tokens = sum(len(r.token_ids) for r in self.responses)
        made: dict[str, Any] = {
            "arm": self.name,
            "ladder": list(self.ladder),
            "seconds": round(self.seconds, 4),
            "tokens": tokens,
            "distinct_responses": len({r.token_ids for r in self.responses}),
            "finite_logprobs": all(x == x for r in self.responses for x in r.logprobs or ()),
            "audit": self.audit(),
            "transitions": [self.transition(e) for e in self.named("stage_commit")],
            "restores": [
                {k: v for k, v in e.items() if k not in ("event", "run", "seed")} for e in self.named("restore_end")
            ],
            "released": self.released(),
            "woken_before_restore_s": self.early(),
            "rehearsals": [{k: e.get(k) for k in ("moved_rows", "captured")} for e in self.named("rehearsal")],
            "room": {e["rank"]: [e["rows"], e["kv_tokens"]] for e in self.named("plan_installed")},
            "faults": [e for e in self.events if e["event"] in ("fault", "plan_skipped")],
        }
        if reference is not None:
            made["against"] = {"arm": reference.name, **compare(reference.responses, self.responses)}
        return made

    def named(self, name: str) -> list[dict[str, Any]]:
        """Events of this name, in order of time."""
        return sorted((e for e in self.events if e["event"] == name), key=lambda e: e["t"])

    def left(self, commit: float) -> float:
        """When the leavers of a commit began to leave."""
        return max((e["t"] for e in self.named("detach_start") if e["t"] < commit), default=commit)

    def released(self) -> list[dict[str, Any]]:
        """What each leaver gave back, and how long that took."""
        began: dict[int, float] = {}
        found = []
        for event in sorted((*self.named("sleep_start"), *self.named("sleep_end")), key=lambda e: e["t"]):
            if event["event"] == "sleep_start":
                began[event["rank"]] = event["t"]
                continue
            found.append(
                {
                    "rank": event["rank"],
                    "bytes": event["released_bytes"],
                    "before": event["process_bytes_before"],
                    "after": event["process_bytes_after"],
                    "seconds": round(event["t"] - began[event["rank"]], 4),
                }
            )
        return found

    def early(self) -> dict[str, float]:
        """Seconds from a rank's wake to the restore, where the wake came first."""
        restored = {e["rank"]: e["t"] for e in self.named("restore_start")}
        woken = {e["rank"]: e["t"] for e in self.named("wake_start")}
        return {str(rank): round(restored[rank] - t, 4) for rank, t in woken.items() if t < restored[rank]}

    def audit(self) -> dict[str, dict[str, int]]:
        """Steps with requests of each rank: full, eager, prefill."""
        counted: dict[str, dict[str, int]] = {}
        for event in self.named("decode_audit"):
            row = counted.setdefault(str(event["rank"]), {"full": 0, "eager": 0, "prefill": 0})
            for key in row:
                row[key] += event.get(key, 0)
        return counted

    def transition(self, event: dict[str, Any]) -> dict[str, Any]:
        """Parts of a shrink in ms, and from the quorum's agreement to the survivors' first step."""
        parts = {k: round(event[k] * 1e3, 2) for k in PARTS if k in event}
        return {
            "ms": parts,
            "quorum_to_first_step_ms": round(sum(parts.values()), 2),
            "token_gap_ms": token_gap_ms(self.responses, event["survivors"], self.left(event["t"]), event["t"]),
            **{k: event.get(k) for k in ("to", "survivors", "moved_rows", "moved_bytes", "captured", "kept")},
        }


def compare(one: Sequence[Response], other: Sequence[Response]) -> dict[str, Any]:
    """Requests with equal tokens, also with equal log-probabilities; the largest difference before tokens split."""
    tokens = exact = 0
    largest, splits = 0.0, []
    for a, b in zip(one, other, strict=True):
        same = a.token_ids == b.token_ids
        tokens += same
        exact += same and a.logprobs == b.logprobs
        split = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), None)
        if split is not None:
            splits.append(split)
        pairs = list(zip(a.logprobs or (), b.logprobs or (), strict=False))[:split]
        largest = max([largest, *(abs(x - y) for x, y in pairs)])
    return {
        "requests": len(one),
        "same_tokens": tokens,
        "same_tokens_and_logprobs": exact,
        "largest_logprob_difference": largest,
        "first_splits": sorted(splits)[:8],
    }
