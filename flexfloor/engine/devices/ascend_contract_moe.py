"""Assumptions about experts, dispatch and its selection; see :mod:`ascend_contract`."""

from __future__ import annotations

from flexfloor.engine.devices.ascend_assumption import RC, Assumption
from flexfloor.engine.devices.source_tree import has, lacks, says, takes

_METHODS = "ops/fused_moe/moe_comm_method.py"
_DISPATCH = "ops/fused_moe/token_dispatcher.py"
_PREPARE = "ops/fused_moe/prepare_finalize.py"
_EXPERTS = "ops/fused_moe/routed_experts.py"
_CONTEXT = "ascend_forward_context.py"

MOE = (
    Assumption(
        "comm-methods-table",
        _METHODS,
        (
            has("_MoECommMethods"),
            takes("setup_moe_comm_method", "moe_config"),
            says("setup_moe_comm_method", "if moe_config.ep_size > 1:", "MC2CommImpl(moe_config)"),
            says("MoECommMethod.__init__", "self.token_dispatcher = self._get_token_dispatcher()"),
        ),
        "a switch clears the table and builds the methods anew",
    ),
    Assumption(
        "comm-methods-key",
        _METHODS,
        (says("_moe_config_key", "_CONFIG_KEY_FIELDS = ('num_experts', 'num_local_experts')"),),
        "the methods of another world stand under another key and would be left behind without a clear",
        (RC,),
    ),
    Assumption(
        "mc2-dispatcher-frozen",
        _DISPATCH,
        (
            says(
                "TokenDispatcherWithMC2.__init__",
                "self.ep_rank_id = get_mc2_group().rank_in_group",
                "self.ep_world_size = get_mc2_group().world_size",
                "self.moe_all_to_all_group_name = backend.get_hccl_comm_name(local_rank)",
            ),
        ),
        "world and rank are frozen when a dispatcher is made",
    ),
    Assumption(
        "mc2-refresh-name-only",
        _DISPATCH,
        (
            says("TokenDispatcherWithMC2.refresh_hccl_group", "self.moe_all_to_all_group_name ="),
            lacks("TokenDispatcherWithMC2.refresh_hccl_group", "ep_world_size", "ep_rank_id"),
        ),
        "a refresh is not enough after a switch",
    ),
    Assumption(
        "mc2-counts-the-map",
        _DISPATCH,
        (
            says(
                "TokenDispatcherWithMC2.get_dispatch_mc2_kwargs",
                "self.moe_expert_num = len(expert_map) + global_redundant_expert_num",
            ),
        ),
        "the map stays E long at every world",
    ),
    Assumption(
        "alltoall-dispatcher-fields",
        _DISPATCH,
        (
            says(
                "TokenDispatcherWithAll2AllV.__init__",
                "self.num_local_experts = kwargs.get('num_local_experts', 0)",
                "[i % self.num_local_experts for i in range(self.num_experts)]",
                "self.local_expert_indices = ",
            ),
        ),
        "their fields are checked after a switch, their table is written after a wake",
    ),
    Assumption(
        "allgather-map-after-log2phy",
        _DISPATCH,
        (
            says(
                "TokenDispatcherWithAllGather.token_dispatch",
                "mask = expert_map[topk_ids] != -1",
                "first_expert_idx = get_ep_group().rank_in_group * self.num_experts_local",
            ),
        ),
        "the map is read with physical ids, and each rank's rows are one run of them",
    ),
    Assumption(
        "log2phy-in-routing",
        _EXPERTS,
        (
            says(
                "AscendRoutedExperts._select_experts",
                "if self.log2phy is not None:\n    topk_ids = self.log2phy[topk_ids]",
            ),
            says("AscendRoutedExperts.__init__", "self.log2phy: torch.Tensor | None = None"),
            says("AscendRoutedExperts.init_eplb", "ascend_expert_map, self.log2phy, self."),
            says("AscendRoutedExperts.ascend_expert_map", "object.__setattr__(self, '_ascend_expert_map', expert_map)"),
            says("AscendUnquantizedFusedMoEMethod.apply", "expert_map=layer.ascend_expert_map"),
        ),
        "both tables are plain attributes of a layer, read at every step; log2phy's presence is a branch of Python",
        (RC,),
    ),
    Assumption(
        "plain-expert-map",
        "eplb/core/eplb_utils.py",
        (says("init_eplb_config", "elif not eplb_enable:", "return (None, expert_map, None, 0)"),),
        "without EPLB options a layer starts with the linear map on the device, no log2phy, no redundancy",
    ),
    Assumption(
        "gather-and-scatter-over-dp",
        _PREPARE,
        (
            says(
                "PrepareAndFinalizeWithAllGather._prepare_with_dp_group",
                "hidden_states = self.moe_config.dp_group.all_gather(hidden_states, 0)",
            ),
            says(
                "PrepareAndFinalizeWithAllGather._finalize_with_dp_group",
                "hidden_states = get_dp_group().reduce_scatter(hidden_states, 0)",
            ),
        ),
        "cached and live DP coordinator must be one object",
    ),
    Assumption(
        "weights-created-by-vllm",
        _EXPERTS,
        (
            says("AscendRoutedExperts.__init__", "super().__init__(*args, **kwargs)", "self._replace_quant_method("),
            lacks("AscendUnquantizedFusedMoEMethod", "def create_weights"),
            says("", "class AscendUnquantizedFusedMoEMethod(UnquantizedFusedMoEMethod):"),
        ),
        "spare rows are allocated where vLLM creates the weights",
        (RC,),
    ),
    Assumption(
        "weights-contiguous-nd",
        _EXPERTS,
        (
            takes("AscendUnquantizedFusedMoEMethod.process_weights_after_loading", "self", "layer"),
            says(
                "AscendUnquantizedFusedMoEMethod.process_weights_after_loading",
                "w13_data = self._maybe_pad_weight(layer.w13_weight.data).transpose(1, 2).contiguous()",
                "replace_parameter(layer, 'w13_weight', w13_data)",
                "enable_fused_mc2 = get_ascend_config().enable_fused_mc2",
            ),
        ),
        "with fused MC2 and NZ off a row is a contiguous slice and can be moved",
        (RC,),
    ),
    Assumption(
        "gate-float32",
        "ops/linear.py",
        (
            says(
                "AscendUnquantizedLinearMethod.process_weights_after_loading",
                "weight_fp32 = layer.weight.data.to(torch.float32)",
                "replace_parameter(layer, 'weight_fp32', new_fp32, prefer_copy=True)",
            ),
        ),
        "the router's float32 weights are derived, and must be derived again after a wake",
        (RC,),
    ),
)

SELECTION = (
    Assumption(
        "selection-reads-config",
        _CONTEXT,
        (
            takes("select_moe_comm_method", "num_tokens", "vllm_config"),
            says("select_moe_comm_method", "get_ep_group().world_size == 1"),
            says(
                "_select_capacity_and_expert_density_moe_comm_method",
                "vllm_config.parallel_config.world_size_across_dp",
                "num_experts_per_device <= 24",
                "ep_world_size >= 16",
                "return MoECommType.ALLGATHER",
            ),
            says(
                "_select_fused_or_capacity_moe_comm_method",
                "num_tokens is None or num_tokens <= mc2_tokens_capacity",
                "return MoECommType.ALLTOALL",
            ),
        ),
        "the rules of flexfloor.exchange; the world is the configuration's, which a switch changes",
        (RC,),
    ),
    Assumption(
        "selection-every-forward",
        _CONTEXT,
        (says("set_ascend_forward_context", "moe_comm_type = select_moe_comm_method("),),
        "selection follows a switch by itself",
    ),
    Assumption(
        "mc2-capacity",
        _CONTEXT,
        (
            says("", "_MC2_TOKENS_PER_RANK_LIMIT = 512"),
            says("set_mc2_tokens_capacity", "if _mc2_tokens_capacity is not None:\n    return"),
            says("get_mc2_tokens_capacity", "return _mc2_tokens_capacity"),
        ),
        "the largest captured batch is the capacity, once and for all worlds",
        (RC,),
    ),
    Assumption(
        "hardware-policies",
        "device/hardware_profile.py",
        (
            says(
                "_HARDWARE_PROFILES",
                "_device_type=AscendDeviceType.A2",
                "moe_comm_policy=MoECommPolicy.CAPACITY_AND_EXPERT_DENSITY",
                "_device_type=AscendDeviceType.A3",
                "moe_comm_policy=MoECommPolicy.FUSED_OR_CAPACITY",
            ),
            has("get_current_hardware_profile"),
        ),
        "the device generation is told by its policy",
        (RC,),
    ),
)
