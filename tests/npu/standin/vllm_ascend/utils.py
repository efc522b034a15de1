import math

import real
import torch
import torch_npu

SLEEP_LIFECYCLE_ANCHOR_GROUP_NAME = "anchor"
NEEDED = (math, torch, torch_npu)
real.take(
    "utils.py",
    globals(),
    "create_hccl_pg_options",
    "get_hccl_config_for_pg_options",
    "get_default_buffer_config",
    "calculate_dp_buffer_size",
    "_DEFAULT_BUFFER_SIZE",
    "_DYNAMIC_EPLB_BUFFER_SIZE",
    "_MIN_DP_BUFFER_SIZE",
    "SLEEP_LIFECYCLE_ANCHOR_BUFFER_SIZE",
)


def is_moe_model(vllm_config):
    return True


def has_layer_idx(model_instance):
    return False


def should_skip_allreduce_across_dp_group(vllm_config, is_draft_model=False):
    return False
