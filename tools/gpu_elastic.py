"""EP 2 -> 1 -> 2 on two CUDA devices through AsyncLLM and the engine-core processes: identity, graphs, time, memory.

One server runs a list of rollouts ("arms") one after another. ``static`` arms keep the full world, ``flex`` arms shrink
and restore; every arm's tokens and log-probabilities are compared with the first static arm of the same requests, and
the event log says what each transition cost by part, what the leaver gave back and which decode steps were replayed.

    small   4 layers, 32 experts, seeded weights written on the spot, invariant combine, poisoned rows: bit-identity
    a3b     the Qwen3-30B-A3B shape, dummy weights: what a transition costs

Usage: python tools/gpu_elastic.py --shape small --json small.json [--combine invariant] [--cycles 5]
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.gaps import token_gap_ms
from gpu.serving import four_ranks, server_spec
from gpu.shapes import SHAPES, write_config, write_weights

from flexfloor.driver.engines import Engines
from flexfloor.driver.handles import LocalServer
from flexfloor.driver.orders import Request, Response, Sampling, StepOrder
from flexfloor.driver.spec import ServerSpec
from flexfloor.events import PARTS, read_events

__all__ = ["SHAPES", "Arm", "Bench", "Load", "four_ranks", "server_spec", "write_weights"]


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

    name: str
    ladder: tuple[int, ...]
    seconds: float
    responses: list[Response]
    events: list[dict[str, Any]] = field(default_factory=list)

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
            "released": [
                {
                    "rank": e["rank"],
                    "bytes": e["released_bytes"],
                    "before": e["process_bytes_before"],
                    "after": e["process_bytes_after"],
                    "seconds": round(e["t"] - start["t"], 4),
                }
                for start, e in zip(self.named("sleep_start"), self.named("sleep_end"), strict=False)
            ],
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
            **{k: event.get(k) for k in ("survivors", "moved_rows", "moved_bytes", "captured", "kept")},
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


class Bench:
    """The server and the arms that ran on it.

    Args:
        spec: how it is started.
        folder: where each arm's events go.
        limit_s: after this the engine processes print their stacks and everything ends.
    """

    def __init__(self, spec: ServerSpec, folder: Path, limit_s: float) -> None:
        self._folder, self._count = folder, 0
        self.records: list[dict[str, Any]] = []
        self._references: dict[Load, Arm] = {}
        self.server = LocalServer(spec)
        self._watch(limit_s)
        began = time.perf_counter()
        self.statuses = self.server.start()
        self.start_s = time.perf_counter() - began

    def _watch(self, limit_s: float) -> None:
        def out() -> None:
            print(f"LIMIT of {limit_s} s reached", flush=True)
            for pid in self.server.server.pids().values():
                os.kill(pid, signal.SIGABRT)
            time.sleep(3)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(3)

        timer = threading.Timer(limit_s, out)
        timer.daemon = True
        timer.start()

    def arm(self, name: str, load: Load, ladder: tuple[int, ...], end: str = "full", **more: Any) -> Arm:
        """Run one rollout, keep and print its record; ``more`` are further fields of its `StepOrder`."""
        events = self._folder / f"arm-{self._count}"
        order = StepOrder(
            digest=hashlib.sha256(f"{self._count}{ladder}".encode()).hexdigest(),
            epoch=0,
            step=self._count,
            ladder=ladder,
            rank_order=tuple(range(ladder[0])),
            requests=load.requests(),
            sampling=Sampling(temperature=load.temperature, ignore_eos=True, logprobs=True),
            run="gpu",
            events_dir=str(events / "events"),
            end=end,
            timed=True,
            **more,
        )
        self._count += 1
        began = time.perf_counter()
        responses = self.server.run_step(order)
        seconds = time.perf_counter() - began
        found = [json.loads(e.to_json()) for e in read_events(events).events]
        arm = Arm(name, ladder, seconds, responses, found)
        record = arm.record(self._references.get(load))
        if len(ladder) == 1:
            self._references.setdefault(load, arm)
        self.records.append(record)
        print("ARM", json.dumps(record), flush=True)
        return arm

    def wake_all(self) -> None:
        """After a topology restore: memory and weights of the sleepers."""
        engines = self._engines()
        self.server.wait(engines.call("wake_all", {}, 60.0))

    def sleep_and_reload(self) -> None:
        """As a trainer does between steps: sleep, weights' memory, weights from disk, KV's memory."""
        engines = self._engines()

        async def renew() -> None:
            await engines.llm.sleep(2)
            await engines.llm.wake_up(["weights"])
            await engines.llm.collective_rpc("reload_weights")
            await engines.llm.wake_up(["kv_cache"])
            await engines.call("loaded", {}, 60.0)

        self.server.wait(renew())

    def status(self) -> list[dict[str, Any]]:
        """Each rank's status now."""
        return self.server.wait(self._engines().call("status", {}, 60.0))

    def _engines(self) -> Engines:
        engines = self.server.server._engines
        if engines is None:
            raise RuntimeError("the server is not started")
        return engines


def arms(bench: Bench, vocabulary: int, cycles: int) -> None:
    """The arms of one server."""
    load = Load((tuple(160 if i % 2 else 110 for i in range(64)), (40,) * 16), vocabulary=vocabulary)
    other = Load(((30,) * 12, tuple(120 if i % 2 else 90 for i in range(24))), vocabulary=vocabulary)
    drawn = Load(load.lengths, temperature=1.0, vocabulary=vocabulary)
    bench.arm("warm-up", Load(((24,) * 64, (24,) * 16), prompt=64, vocabulary=vocabulary), (2,))
    bench.arm("static", load, (2,))
    bench.arm("static again", load, (2,))
    bench.arm("flex, graphs captured", load, (2, 1))
    bench.arm("static after restore", load, (2,))
    bench.arm("flex, graphs kept", load, (2, 1))
    bench.arm("static other", other, (2,))
    bench.arm("flex other, rank 1 survives", other, (2, 1))
    bench.arm("flex other, graphs kept", other, (2, 1))
    bench.arm("static drawn", drawn, (2,))
    bench.arm("flex drawn", drawn, (2, 1))
    bench.arm("flex, topology only", load, (2, 1), end="topology")
    bench.wake_all()
    bench.arm("static after wake", load, (2,))
    for cycle in range(cycles):
        bench.arm(f"cycle {cycle}", load, (2, 1))
    bench.arm("static at the end", load, (2,))


def memory_spread(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Largest difference of device memory in use between cycles, MiB: just before and just after a leaver's sleep."""
    slept = [row for r in records if r["arm"].startswith("cycle") for row in r["released"]]
    return {
        when: round((max(row[when] for row in slept) - min(row[when] for row in slept)) / (1 << 20), 1)
        for when in ("before", "after")
        if slept
    }


def versions() -> dict[str, str]:
    """What ran."""
    import torch
    import vllm

    return {
        "vllm": vllm.__version__,
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "device": torch.cuda.get_device_name(0),
        "devices": str(torch.cuda.device_count()),
    }


def main() -> None:
    """Run the arms and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--combine", choices=("stock", "invariant"), default="invariant")
    parser.add_argument("--cycles", type=int, default=0)
    parser.add_argument("--use", type=float, default=0.8, help="share of the device's memory for the engine")
    parser.add_argument("--limit", type=float, default=280.0, help="seconds until stacks are printed and all ends")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    os.environ["PYTHONFAULTHANDLER"] = "1"
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dummy = options.shape == "a3b"
        model = (write_config if dummy else write_weights)(folder / "model", shape)
        spec = server_spec(model, folder, dummy=dummy, combine=options.combine, poison=not dummy, use=options.use)
        bench = Bench(spec, folder, options.limit)
        result: dict[str, Any] = {
            "shape": options.shape,
            "combine": options.combine,
            "start_s": round(bench.start_s, 1),
            "facts": [status["facts"] for status in bench.statuses],
            "arms": bench.records,
        }
        print("START", result["start_s"], json.dumps(result["facts"]), flush=True)
        try:
            arms(bench, shape["vocab_size"], options.cycles)
            result["cycle_memory_spread_mib"] = memory_spread(bench.records)
        finally:
            options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
            bench.server.close()
        result["versions"] = versions()
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print("DONE", options.json, flush=True)


if __name__ == "__main__":
    main()
