"""What driver and rollout server say to each other: plain records that travel through Ray."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flexfloor.config import FlexFloorConfig
from flexfloor.plan import EpochPlan, StepPlan
from flexfloor.workload import Workload


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; equal for all requests of a step.

    Attributes:
        temperature, top_p, top_k: as in vLLM.
        ignore_eos: generate to the limit.
        logprobs: keep the logprob of every sampled token.
        seeded: draw each response with its request's seed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    logprobs: bool = False
    seeded: bool = True

    @classmethod
    def of(cls, config: FlexFloorConfig) -> Sampling:
        """The sampling of a configuration."""
        rollout = config.rollout
        return cls(
            rollout.temperature, rollout.top_p, rollout.top_k, rollout.ignore_eos, rollout.logprobs, rollout.seeded
        )


@dataclass(frozen=True)
class Request:
    """One response to generate.

    Attributes:
        item_id: the prompt's identity.
        sample: index of the response among all of the item in the epoch.
        rank: planned rank.
        content: prompt text or token ids.
        max_tokens: response limit, tokens.
        seed: seed of the response.
        step_cap: whether ``max_tokens`` is the step's cap below the global limit (a response it stops is censored).
    """

    item_id: str
    sample: int
    rank: int
    content: str | tuple[int, ...]
    max_tokens: int
    seed: int
    step_cap: bool


@dataclass(frozen=True)
class StepOrder:
    """One step as the server is asked to run it.

    Attributes:
        digest: what the ranks agree on before they decide anything, hexadecimal.
        epoch, step: position of the step.
        ladder: EP sizes from the world size down; the world size alone switches shrinking off.
        rank_order: all ranks, first to leave in front.
        requests: the responses to generate.
        sampling: how.
        run: run id of the events.
        events_dir: folder of the ranks' event files.
        seed: seed written with the events.
        gate: no rank steps before all requests have arrived everywhere.
        end: ``full`` or ``topology``, what the restore after generation brings back.
        timed: whether responses say when each of their tokens arrived.
        predicted: survivors that planned residency makes ready beforehand, one set a stage; empty: natural residency.
        kv_tokens: KV tokens a rank that the plan counts on; None: all that there is room for at the ladder's floor.
    """

    digest: str
    epoch: int
    step: int
    ladder: tuple[int, ...]
    rank_order: tuple[int, ...]
    requests: tuple[Request, ...]
    sampling: Sampling
    run: str
    events_dir: str
    seed: int = 0
    gate: bool = True
    end: str = "full"
    timed: bool = False
    predicted: tuple[tuple[int, ...], ...] = ()
    kv_tokens: int | None = None

    @property
    def expected(self) -> list[int]:
        """Responses of each rank."""
        placed = Counter(request.rank for request in self.requests)
        return [placed[rank] for rank in range(self.ladder[0])]

    def installation(self) -> dict[str, Any]:
        """The JSON that every engine installs."""
        return {
            "digest": self.digest,
            "epoch": self.epoch,
            "step": self.step,
            "ladder": list(self.ladder),
            "expected": self.expected,
            "rank_order": list(self.rank_order),
            "gate": self.gate,
            "auto_close": True,
            "end": self.end,
            "predicted": [list(survivors) for survivors in self.predicted],
            "kv_tokens": self.kv_tokens,
            "seed": self.seed,
            "run": self.run,
            "events_dir": self.events_dir,
        }


@dataclass(frozen=True)
class Response:
    """One generated response.

    Attributes:
        request: what was asked for.
        rank: the rank that served it.
        token_ids: generated tokens, a generated EOS included.
        logprobs: of the sampled tokens; None when not asked for.
        finish_reason: ``stop`` or ``length``.
        num_preempted: preemptions it suffered.
        prompt_tokens: length of the prompt, tokens.
        times: when each token reached the server (seconds, the event log's clock); empty where the order is not timed.
    """

    request: Request
    rank: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str
    num_preempted: int
    prompt_tokens: int
    times: tuple[float, ...] = ()

    @property
    def stopped_by_cap(self) -> bool:
        """Stopped by its token limit, or by the engine's longest sequence before that."""
        return self.finish_reason == "length"

    @property
    def censored(self) -> bool:
        """Stopped by a step cap or the engine's longest sequence, below its own limit: the true length is longer."""
        cut = len(self.token_ids) < self.request.max_tokens
        return self.stopped_by_cap and (cut or self.request.step_cap)


@dataclass(frozen=True)
class Progress:
    """Where a server stands.

    Attributes:
        phase: ``starting``, ``ready``, ``generating``, ``restoring`` or ``closed``.
        epoch, step: the step in progress, None between steps.
        responses: finished responses of the step.
        tokens: tokens generated in the step so far.
        world: ranks of the EP group now.
    """

    phase: str = "starting"
    epoch: int | None = None
    step: int | None = None
    responses: int = 0
    tokens: int = 0
    world: int = 0


@dataclass(frozen=True)
class Failure:
    """An error that the server reports instead of a result, since exceptions lose their fields on the way.

    Attributes:
        kind: name of the error in :mod:`flexfloor.errors`.
        values: its arguments.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)


def step_digest(step: StepPlan, ladder: tuple[int, ...]) -> str:
    """Digest of a step as it is installed: the plan's, and the ladder in force."""
    return hashlib.sha256(f"{step.digest}:{list(ladder)}".encode()).hexdigest()


def predicted_survivors(
    step: StepPlan, ladder: tuple[int, ...], rank_order: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Ranks that the plan predicts to be left at each stage: those that complete last; none with natural residency."""
    if step.residency != "planned":
        return ()
    leaves = {rank: place for place, rank in enumerate(rank_order)}
    by_end = [group.rank for group in sorted(step.ranks, key=lambda group: (group.completion, leaves[group.rank]))]
    return tuple(tuple(sorted(by_end[-size:])) for size in ladder[1:])


def requests_of(
    plan: EpochPlan, workload: Workload, config: FlexFloorConfig, epoch: int
) -> Iterator[tuple[StepPlan, tuple[Request, ...]]]:
    """The requests of each step. An item that stands several times in the epoch goes on counting its samples."""
    limit = config.rollout.max_tokens or config.tail_guard.l_max
    begun: Counter[str] = Counter()
    for step in plan.steps:
        requests: list[Request] = []
        for group in step.ranks:
            for item_id in group.items:
                prompt = workload[item_id]
                own = min(prompt.max_tokens or limit, limit)
                capped = step.cap is not None and step.cap < own
                most = step.cap if capped and step.cap is not None else own
                for _ in range(prompt.n or config.responses_per_prompt):
                    sample = begun[item_id]
                    begun[item_id] += 1
                    seed = prompt.response_seed(epoch, sample, config.rollout.seed)
                    requests.append(Request(item_id, sample, group.rank, prompt.content, most, seed, capped))
        yield step, tuple(requests)
