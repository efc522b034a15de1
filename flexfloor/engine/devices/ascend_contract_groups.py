"""Assumptions about groups, options of vllm-ascend and torch_npu; see :mod:`ascend_contract`."""

from __future__ import annotations

from flexfloor.engine.devices import ascend_options
from flexfloor.engine.devices.ascend_assumption import RC, Assumption
from flexfloor.engine.devices.source_tree import Rule, absent, has, raw, says, takes

_GROUPS = "patch/worker/patch_distributed.py"
_STATE = "distributed/parallel_state.py"

GROUPS = (
    Assumption(
        "coordinator-fields",
        _GROUPS,
        (
            takes("GroupCoordinatorPatch.__init__", "self", "group_ranks", "local_rank", "group_name"),
            says("GroupCoordinatorPatch.__init__", "self.group_ranks = group_ranks"),
            says(
                "GroupCoordinatorPatch._init_device_groups",
                "self.ranks = ranks",
                "self.world_size = len(ranks)",
                "self.rank_in_group = ranks.index(self.rank)",
                "self.cpu_group = cpu_group",
                "self.device_group = self_device_group",
            ),
            says("GroupCoordinatorPatch._init_device_communicator", "self.device_communicator = NPUCommunicator"),
            says("", "vllm.distributed.parallel_state.GroupCoordinator = GroupCoordinatorPatch"),
        ),
        "a switch changes these fields of the live coordinators",
    ),
    Assumption(
        "mc2-coordinator",
        _STATE,
        (has("_MC2"), says("get_mc2_group", "return _MC2"), says("init_ascend_model_parallel", "group_name='mc2'")),
        "MC2 has a coordinator of its own over the EP ranks",
    ),
    Assumption(
        "npu-communicator",
        "distributed/device_communicators/npu_communicator.py",
        (takes("NPUCommunicator.__init__", "self", "cpu_group", "device", "device_group", "unique_name"),),
        "a survivor set gets communicators",
    ),
    Assumption(
        "hccl-buffer-by-name",
        "utils.py",
        (
            takes("create_hccl_pg_options", "group_name"),
            says(
                "create_hccl_pg_options", "hccl_config['group_name'] = group_name", "options.hccl_config = hccl_config"
            ),
            says("get_hccl_config_for_pg_options", "if group_name and 'mc2' in group_name:\n    return None"),
            says("get_hccl_config_for_pg_options", "'dp': {'hccl_buffer_size': calculate_dp_buffer_size()}"),
            says("calculate_dp_buffer_size", "vllm_config = get_current_vllm_config()"),
        ),
        "HCCL groups get a unique name, MC2's no buffer size of its own; a configuration must be current for any other",
    ),
    Assumption(
        "moe-config-caches-groups",
        "ops/fused_moe/fused_moe.py",
        (
            says(
                "AscendMoERunner.__init__",
                "self.moe_config.dp_group = get_dp_group()",
                "self.moe_config.ep_group = get_ep_group()",
                "self.moe_config.mc2_group = get_mc2_group()",
            ),
        ),
        "coordinators and MoE configuration change in place; a copied configuration would lose the groups",
        (RC,),
    ),
    Assumption(
        "engine-core-class",
        "patch/platform/patch_engine_core.py",
        (
            says(
                "_patch_dp_engine_core_proc",
                "_engine_core_mod.DPEngineCoreProc = DyntraLBDPEngineCoreProc",
                "_engine_core_mod.DPEngineCoreProc = BalanceDPEngineCoreProc",
                "elif _balance_scheduling_enabled(vllm_config):",
            ),
        ),
        "vLLM's engine core, whose methods FlexFloor replaces, runs unless one of two refused options is on",
        (RC,),
    ),
)


def _option_rules() -> tuple[Rule, ...]:
    """Each option that is read has its field; each that is called removed has none."""
    owners = {
        "eplb_config": "EplbConfig",
        "rl_config": "RlConfig",
        "finegrained_tp_config": "FinegrainedTPConfig",
        "scheduler_config": "SchedulerConfig",
        "dyntra_lb_config": "DyntraLBConfig",
        "profiling_chunk_config": "ProfilingChunkConfig",
        "xlite_graph_config": "XliteGraphConfig",
        "ascend_compilation_config": "AscendCompilationConfig",
    }
    rules = []
    for option in ascend_options.OPTIONS:
        owner = owners[option.path[-2]] if len(option.path) > 1 else "AscendConfig"
        symbol = f"{owner}.{option.path[-1]}"
        rules.append(absent(symbol) if option.removed else has(symbol))
    return tuple(rules)


OPTIONS = (
    Assumption(
        "options-exist",
        "ascend_config.py",
        _option_rules(),
        "a refused option that changed its name would be let through",
        (RC,),
    ),
)

TORCH = (
    Assumption(
        "c10d-helper-patched",
        "distributed/distributed_c10d.py",
        (
            takes(
                "_patched_new_process_group_helper",
                "group_size",
                "group_rank",
                "global_ranks_in_group",
                "backend",
                "store",
                "group_name",
                "backend_options",
                "timeout",
            ),
            says("_patched_new_process_group_helper", "backend_class = creator_fn(dist_backend_opts, backend_options)"),
        ),
        "groups of some ranks are made through it",
        package="torch_npu",
    ),
    Assumption(
        "hccl-options-type",
        "_init/registry/distributed.py",
        (
            says(
                "_new_process_group_hccl_helper",
                "isinstance(pg_options, torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options)",
                "pg_options.global_ranks_in_group = dist_backend_opts.global_ranks_in_group",
            ),
            says("register_distributed_backend_for_npu", "extended_api=True"),
        ),
        "options with name and buffer size reach HCCL",
        package="torch_npu",
    ),
    Assumption(
        "hccl-comm-name",
        "include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp",
        (raw("std::string getHcclCommName(int rankid, bool init_comm = true)", "hccl_config;"),),
        "asking for a communicator's name makes it",
        package="torch_npu",
    ),
    Assumption(
        "p2p-batch",
        "distributed/distributed_c10d.py",
        (takes("_batch_isend_irecv", "p2p_op_list"), says("_batch_isend_irecv", "elif device.type == 'npu':")),
        "rows travel in one batch of P2P operations",
        package="torch_npu",
    ),
)
