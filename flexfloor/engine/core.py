"""What FlexFloor adds to one engine core: the DP sync point is where the ranks agree (see hooks.py)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from flexfloor.elastic.ballot import Ballot
from flexfloor.elastic.board import Board
from flexfloor.elastic.faults import FaultPlan
from flexfloor.elastic.placement import Placement
from flexfloor.elastic.session import Session
from flexfloor.elastic.step import Local, Step
from flexfloor.engine import lifetime
from flexfloor.engine.budget import Budget
from flexfloor.engine.rpc import CoreWorker, exchange_over
from flexfloor.engine.settings import EngineSettings
from flexfloor.events import EventWriter, event_file

GATE_PAUSE_S = 0.001


def tokens_left(scheduler: Any) -> int:
    """Most tokens that an unfinished request of vLLM's scheduler may still give beyond those in flight; 0: none."""
    unfinished = [*scheduler.running, *scheduler.waiting]
    return max((r.max_tokens - r.num_output_tokens - r.num_output_placeholders for r in unfinished), default=0)


class ElasticCore:
    """What FlexFloor adds to one engine core.

    Args:
        engine: the DPEngineCoreProc.
        settings: the engine settings.
    """

    def __init__(self, engine: Any, settings: EngineSettings) -> None:
        rank = int(engine.dp_rank)
        self.engine, self.settings = engine, settings
        self.worker = CoreWorker(engine)
        self.facts: dict[str, Any] = self.worker.call("facts")
        self.events = self._writer(settings.events_dir, settings.run)
        self._budget = Budget(engine, self.worker, self.facts)
        self._log = (settings.events_dir, settings.run)
        placement = Placement.linear(self.facts["experts"], settings.world_size, self.facts["capacity"])
        exchange = exchange_over(lambda: engine.dp_group, rank, settings.world_size)
        board = Board(settings.board, settings.world_size)
        ballot = Ballot(rank, exchange, self._emit, board, FaultPlan.of(settings.faults, rank))
        self.session = Session(settings.world_size, placement, self.worker, ballot, deadline_s=settings.deadline_s)
        self._steps = 0
        self._dummy_steps, self._dummy_seconds = 0, 0.0
        self._preempted: dict[str, int] = {}
        lifetime.follow_parent()

    def _writer(self, folder: str, run: str) -> EventWriter:
        rank = int(self.engine.dp_rank)
        file = event_file(folder, rank, self.settings.replica)
        return EventWriter(file, run=run, rank=rank, replica=self.settings.replica)

    def _write_to(self, folder: str, run: str) -> None:
        """Later events go to another run's folder (one server serves several runs)."""
        if (folder, run) != self._log:
            self.events.close()
            self.events, self._log = self._writer(folder, run), (folder, run)

    def _emit(self, event: str, **fields: Any) -> None:
        t = fields.pop("t", None)
        if event in ("detach_end", "generation_end"):
            self._audit()
        if event == "wake_end":
            fields.setdefault("kv_tokens", self.kv_tokens())
            fields.setdefault("floor", len(self.session.world.members))
        self.events.emit(event, t=t, **fields)

    def _audit(self) -> None:
        """Model steps with requests since the last audit: replayed from a full graph, with prompt tokens, or eager."""
        steps, self._steps = self._steps, 0
        full = min(steps, int(self.worker.call("graph_replays")))
        prefill = min(steps - full, int(self.worker.call("prefill_steps")))
        graphs = int(self.facts["graphs"])
        self.events.emit("decode_audit", full=full, eager=steps - full - prefill, prefill=prefill, graphs=graphs)

    def kv_tokens(self) -> int:
        """Usable KV tokens of this rank."""
        return self._budget.tokens()

    # -- hooks of the engine loop -------------------------------------------------------------

    def sync(self, unfinished: bool) -> bool:
        """The DP sync point; returns whether the engines keep running."""
        engine, session = self.engine, self.session
        engine.step_counter += 1
        scheduler = engine.scheduler
        open_requests = scheduler.get_num_unfinished_requests() if unfinished else 0
        had_step = session.step is not None
        if had_step:
            self._watch_preemptions()
        stock = engine.step_counter == 1 or engine.step_counter % engine.dp_sync_interval == 0
        if not (session.due(open_requests) if session.eager else stock):
            return True
        if session.held:
            time.sleep(GATE_PAUSE_S)
        outcome = session.sync(
            Local(
                unfinished=open_requests,
                kv_free=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                pause=engine.pending_pause,
                tokens_left=tokens_left(scheduler) if session.world.armed else 0,
            )
        )
        if outcome.paused:
            engine.ignore_start_dp_wave = True
            engine.pending_pause = False
        if had_step and session.step is None:
            self._step_over()
        return outcome.running

    def may_step(self) -> bool:
        """False while this rank is parked or held at the gate."""
        return not self.session.idle

    def step(self, run: Callable[[], bool]) -> bool:
        """The engine's own step, if this rank may run the model now; returns whether the model ran."""
        if not self.may_step():
            return False
        executed = run()
        self._steps += int(executed)
        return executed

    def dummy(self, run: Callable[[], None]) -> None:
        """A dummy batch for the others' sake: counted and timed; none while parked or held."""
        if not self.may_step():
            return
        began = time.perf_counter()
        run()
        self._dummy_steps += 1
        self._dummy_seconds += time.perf_counter() - began

    def arrived(self, request: Any) -> None:
        """Count a request towards this rank's expected trajectories."""
        if self.session.step is None:
            return
        params = getattr(request, "sampling_params", None)
        extra = (getattr(params, "extra_args", None) or {}).get("flexfloor", {})
        self.session.trajectories.arrive(str(extra.get("trajectory", request.request_id)), more=bool(extra.get("more")))

    def _watch_preemptions(self) -> None:
        for request in self.engine.scheduler.running + list(self.engine.scheduler.waiting):
            count = getattr(request, "num_preemptions", 0)
            if count > self._preempted.get(request.request_id, 0):
                self._preempted[request.request_id] = count
                self._emit(
                    "preemption",
                    request=request.request_id,
                    recomputed_tokens=request.num_tokens - request.num_computed_tokens,
                )

    def _step_over(self) -> None:
        self._emit("dummy_steps", count=self._dummy_steps, seconds=self._dummy_seconds)
        self._dummy_steps, self._dummy_seconds = 0, 0.0
        self._preempted.clear()

    # -- utility calls (JSON in, JSON out) ------------------------------------------------------

    def install(self, text: str) -> str:
        """Install one step; returns this rank's acknowledgement."""
        values = json.loads(text)
        step = Step(
            digest=values["digest"],
            epoch=values["epoch"],
            step=values["step"],
            ladder=tuple(values["ladder"]),
            expected=values["expected"][self.session.rank],
            rank_order=tuple(values["rank_order"]),
            gate=values.get("gate", True),
            auto_close=values.get("auto_close", True),
            end=values.get("end", "full"),
            predicted=tuple(map(tuple, values.get("predicted", ()))),
        )
        self._write_to(values.get("events_dir", self._log[0]), values.get("run", self._log[1]))
        self.events.set_step(values["epoch"], values["step"], values.get("seed"))
        self.session.check(step)
        try:
            self._budget.make(step.ladder[-1], values.get("kv_tokens"))
        finally:
            # After a failure: whatever lies behind the rows of the full world is taken for lost.
            self.session.backed(self._budget.rows or self.facts["experts"] // self.settings.world_size)
        self.session.install(step, kv_tokens=self.kv_tokens(), rows=self._budget.rows)
        return json.dumps({**self.session.status(), "digest": step.digest, "kv_tokens": self.kv_tokens()})

    def call(self, name: str, text: str) -> str:
        """One of the session's calls by name."""
        session, values = self.session, json.loads(text)
        if name == "status":
            told = {"kv_tokens": self.kv_tokens(), "kv_tokens_by_floor": self._budget.tokens_by_floor()}
            return json.dumps({**session.status(), "facts": self.facts, **told})
        if name == "withdraw":
            session.withdraw(values.get("digest"))
        elif name == "close":
            session.trajectories.close()
        elif name == "close_trajectory":
            session.trajectories.close_trajectory(values["trajectory"])
        elif name == "revise":
            session.trajectories.revise(values["delta"])
        elif name == "restore":
            session.request_restore()
        elif name == "wake_all":
            session.wake_all()
        elif name == "loaded":
            session.loaded(values.get("version"))
            self._emit("weights_loaded", version=session.version, rows=self.worker.call("row_versions"))
        else:
            raise ValueError(f"unknown call '{name}'")
        return json.dumps(session.status())
