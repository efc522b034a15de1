"""verl's synchronous trainer, its prompts chosen and placed by the plan.

    epoch begins   history as of its begin -> plans (one a replica) -> RUN_DIR/plans
    step           plan installed on every rank -> prompts to agent loops -> responses -> full world -> history
                   -> verl's update, checkpoint, weight sync (all ranks, version recorded) -> metrics

Invariants: every dataset row is trained once an epoch, the short last step included; a step's plan depends on the
history as of its epoch's begin alone; the history holds step k when, and only when, its rollout is over; no update
begins before the full world stands.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from omegaconf import open_dict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from flexfloor.errors import FlexFloorError, ProtocolError
from verl_integration import replica
from verl_integration.dataset import identify
from verl_integration.epochs import (
    Placement,
    TrainStep,
    dataset_order,
    plan_replicas,
    steps_per_epoch,
    train_steps,
)
from verl_integration.harvest import Kept, gather, observations
from verl_integration.manager import PLAN
from verl_integration.metrics import PREFIX, EventTail, step_metrics
from verl_integration.orders import StepReport, installation
from verl_integration.records import RunRecords
from verl_integration.section import RunSettings

POLL_S = 0.2
LEAST_AGREEMENT = 0.9
"""Below this correlation of rollout and trainer probabilities the weights themselves are in doubt."""

logger = logging.getLogger(__name__)


@register_trainer("flexfloor")
class FlexFloorTrainer(PPOTrainerSync):  # type: ignore[misc]
    """``trainer.v1.trainer_mode: flexfloor``."""

    def __init__(self, config: Any) -> None:
        run = RunSettings.of_rollout(config.actor_rollout_ref.rollout)
        if run is None:
            raise ProtocolError("trainer mode 'flexfloor' needs the section; start with verl_integration.main")
        self.run, self.section = run, run.config
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl asks for it by name; all else is the synchronous trainer's
        replica.register()
        self.records = RunRecords(run)
        self._tail = EventTail(run.events_dir)
        self._tail.skip()
        self._steps: dict[int, list[TrainStep]] = {}
        self._planning_s = 0.0
        self._step: TrainStep | None = None
        self._prompts: dict[str, Placement] = {}
        self._ended_at: float | None = None
        super().__init__(config)

    # -- verl's dataset, by item ---------------------------------------------------------------

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = POLL_S
        return buffer

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self.items = identify(self.train_dataset, self.tokenizer, self.config, self.section)
        self.steps_per_epoch = steps_per_epoch(len(self.items), self.section.step_prompts)
        if self.config.trainer.total_training_steps is None:
            self.total_training_steps = self.steps_per_epoch * self.config.trainer.total_epochs
            with open_dict(self.config):
                self.config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        forgotten = self.records.resume(self.global_steps)
        if forgotten:
            logger.warning("history: %d steps after checkpoint %d are forgotten", forgotten, self.global_steps)

    # -- plans ---------------------------------------------------------------------------------

    def planned(self, global_step: int) -> TrainStep:
        """The plan of a global step (1-based)."""
        epoch, step = divmod(global_step - 1, self.steps_per_epoch)
        if epoch not in self._steps:
            self._steps = {epoch: self._plan(epoch)}
        return self._steps[epoch][step]

    def _plan(self, epoch: int) -> list[TrainStep]:
        began = time.perf_counter()
        known = self.records.known(epoch * self.steps_per_epoch)
        order = dataset_order(
            self.items.ids, epoch, shuffle=bool(self.config.data.shuffle), seed=int(self.config.data.get("seed") or 1)
        )
        plans = plan_replicas(self.section, known, order, self.run.replicas, epoch)
        self.records.save_plans(plans)
        self._planning_s = time.perf_counter() - began
        return train_steps(self.section, plans, self.items, epoch)

    # -- one step ------------------------------------------------------------------------------

    def _next_train_batch(self, num_prompts: int | None = None) -> Any:
        """The prompts of the planned step, in the order of the plan; see verl's own."""
        step = self._step = self.planned(self.global_steps)
        fields = collate_fn([self.train_dataset[placement.row] for placement in step.placements])
        uids = [str(uuid.uuid4()) for _ in step.placements]
        self._prompts = dict(zip(uids, step.placements, strict=True))
        fields["uid"] = np.array(uids, dtype=object)
        batch = tu.get_tensordict(fields)
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        tu.assign_non_tensor_stack(batch, PLAN, [dataclasses.asdict(placement) for placement in step.placements])
        return batch

    def _submit_batch_to_rollout(self, batch: Any) -> int:
        step = self._step
        if step is None:
            raise ProtocolError("prompts without a plan")
        events, world = self.records.events, self.section.world_size
        events.set_step(step.epoch, step.step, self.section.rollout.seed)
        self._ended_at = None
        events.emit("rollout_start", world_size=world * self.run.replicas)
        orders = [installation(self.run, step, one) for one in range(self.run.replicas)]
        calls = [
            server.flexfloor_begin.remote(order)
            for server, order in zip(self._servers(), orders, strict=True)
            if order is not None
        ]
        for refused in ray.get(calls):
            if refused is not None:
                raise FlexFloorError(refused)
        return int(super()._submit_batch_to_rollout(batch))

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> Any:
        """verl's step over the prompts of the plan (the last step of an epoch may be short)."""
        try:
            return super()._step_once(metrics, timing_raw, len(self._prompts))
        except RuntimeError as error:
            causes = self._causes()
            if not causes:
                raise
            raise FlexFloorError(f"step {self.global_steps} failed: {causes[0]}") from error

    def on_sample_end(self) -> None:
        """The full world stands before anything else happens."""
        reports = ray.get([server.flexfloor_end.remote() for server in self._servers()])
        for report in reports:
            if not isinstance(report, StepReport):
                raise FlexFloorError(f"step {self.global_steps} failed: {report}")
            for why in report.lost:
                logger.warning("step %d: a response is missing: %s", self.global_steps, why)
            if self.run.replicas > 1:
                self.records.events.emit("generation_end", t=report.generated_at, replica=report.replica)
        self._ended_at = max(report.ended_at for report in reports)
        super().on_sample_end()

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], **kwargs: Any) -> Any:
        """Harvests lengths before verl pads and reorders the batch."""
        step = self._step
        if step is not None and self._ended_at is not None:
            kept = self._kept(batch)
            if self.section.verl.responses:
                self._save_responses(step, batch)
            self._finish_rollout(step, kept, self._ended_at)
            self._ended_at = None
        return super()._balance_batch(batch, metrics, **kwargs)

    def _kept(self, batch: Any) -> list[Kept]:
        masks = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        tokens = [int(mask.sum()) for mask in masks["response_mask"].unbind()]
        prompts = [int(tag["prompt_len"]) for tag in batch.tags]
        return gather(batch.keys, prompts, tokens, self._prompts, self.section.tail_guard.l_max)

    def _save_responses(self, step: TrainStep, batch: Any) -> None:
        fields = ["responses", "rollout_log_probs"] if self._has_logprobs() else ["responses"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        columns = [data[field].unbind() for field in fields]
        lines = []
        for key, *values in zip(batch.keys, *columns, strict=True):
            uid, session, _ = key.rsplit("_", 2)
            placement = self._prompts[uid]
            line = {
                "item_id": placement.item_id,
                "epoch": step.epoch,
                "step": step.step,
                "sample": placement.samples[int(session)],
                "rank": placement.rank,
                "token_ids": values[0].tolist(),
            }
            lines.append(line | {"logprobs": values[1].tolist()} if len(values) > 1 else line)
        self.records.save_responses(lines)

    def _has_logprobs(self) -> bool:
        return bool(self.config.actor_rollout_ref.rollout.calculate_log_probs)

    def _finish_rollout(self, step: TrainStep, kept: list[Kept], ended_at: float) -> None:
        short = sum(one.censored for one in kept)
        self.records.events.emit(
            "rollout_end",
            t=ended_at,
            response_tokens=sum(one.tokens for one in kept),
            world_size=self.section.world_size * self.run.replicas,
            responses=len(kept),
            cap_hits={"short": short, "global": sum(one.at_limit for one in kept)},
        )
        self.records.record(self.global_steps, step.epoch, observations(step.epoch, kept))

    def _servers(self) -> list[Any]:
        return [one.servers[0] for one in self.llm_server_manager.get_replicas()]

    def _causes(self) -> list[str]:
        found = ray.get([server.flexfloor_health.remote() for server in self._servers()])
        return [line for lines in found for line in lines]

    # -- figures -------------------------------------------------------------------------------

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        result = super()._compute_metrics(batch, metrics, *args, **kwargs)
        step = self._step
        agreement = metrics.get("training/rollout_actor_probs_pearson_corr")
        if agreement is not None and agreement < LEAST_AGREEMENT:
            what = (
                "step %d: rollout and trainer disagree on the responses (correlation of probabilities %.3f, gap %.4f)"
            )
            gap = metrics.get("training/rollout_probs_diff_mean", float("nan"))
            logger.warning(
                f"{what}: the engines may hold other weights than the trainer", self.global_steps, agreement, gap
            )
        if step is not None:
            metrics.update(step_metrics(self._tail.read(), step.epoch, step.step))
            metrics[f"{PREFIX}/planning_seconds"] = self._planning_s
            metrics[f"{PREFIX}/epoch"], metrics[f"{PREFIX}/step"] = step.epoch, step.step
            self._planning_s = 0.0
        return result
