"""verl's own checks of its configuration, whose assertions become one line."""

from __future__ import annotations

from typing import Any

from flexfloor.errors import InputError


def check_verl(config: Any) -> None:
    """What verl's entry point checks before it starts Ray.

    Raises:
        InputError: verl refuses the configuration.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    critic = need_critic(config)
    if critic and config.trainer.device == "cpu":
        raise InputError(
            "verl loads a critic with FlashAttention, which a CPU has not: set algorithm.adv_estimator=grpo and leave "
            "critic.enable out"
        )
    try:
        validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=critic)
    except (AssertionError, ValueError) as error:
        raise InputError(f"verl refuses the configuration: {error}{_remedy(config, str(error))}") from error


def _remedy(config: Any, text: str) -> str:
    if "minimal possible batch size" in text:
        devices = int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
        return (
            f"; choose data.train_batch_size x rollout.n as a multiple of {devices}, "
            "or set actor_rollout_ref.actor.use_dynamic_bsz=true"
        )
    return ""
