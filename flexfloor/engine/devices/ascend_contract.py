"""What the Ascend module relies on in vllm-ascend and torch_npu, entry by entry, checked by reading their source.

``check_installed`` runs before anything starts; `tests/npu/test_contract.py` runs the same entries against the
packages as released. Nothing is imported. Comments in the module name an entry as ``contract: NAME``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flexfloor.engine import upstream
from flexfloor.engine.devices import ascend_options
from flexfloor.engine.devices.source_tree import Rule, SourceTree, absent, has, lacks, raw, says, takes
from flexfloor.engine.upstream import Symbol
from flexfloor.errors import RefusedError, UpstreamChangedError

RC, STABLE = "0.30.0rc2", "0.23.0.post1"
TESTED = (RC,)
"""Releases of vllm-ascend that the module is written for."""
READ = (RC, STABLE)
"""Releases that were read. 0.23.0.post1 stands on vLLM 0.23, which FlexFloor's engine core is not written for."""
TORCH_NPU = "2.10.0.post4"


@dataclass(frozen=True)
class Assumption:
    """One thing that is relied on.

    Attributes:
        name: its name in comments, tests and docs.
        file: file within the package.
        rules: what must hold there.
        why: what in the module stands on it.
        releases: releases of vllm-ascend where it holds; in the others that were read it does not.
        package: ``vllm_ascend`` or ``torch_npu``.
    """

    name: str
    file: str
    rules: tuple[Rule, ...]
    why: str
    releases: tuple[str, ...] = READ
    package: str = "vllm_ascend"

    def broken(self, tree: SourceTree) -> str | None:
        """What does not hold, or None."""
        return next((what for rule in self.rules if (what := rule(tree, self.file)) is not None), None)


_GROUPS = "patch/worker/patch_distributed.py"
_STATE = "distributed/parallel_state.py"
_METHODS = "ops/fused_moe/moe_comm_method.py"
_DISPATCH = "ops/fused_moe/token_dispatcher.py"
_PREPARE = "ops/fused_moe/prepare_finalize.py"
_EXPERTS = "ops/fused_moe/routed_experts.py"
_CONTEXT = "ascend_forward_context.py"
_WORKER = "worker/worker.py"
_RUNNER = "worker/model_runner_v1.py"
_CAMEM = "device_allocator/camem.py"
_CLEANUP = "device_allocator/sleep_mem_optimized.py"
_ACL = "compilation/acl_graph.py"

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

MEMORY = (
    Assumption(
        "sleep-level-2",
        _WORKER,
        (
            takes("NPUWorker.sleep", "self", "level"),
            says(
                "NPUWorker.sleep",
                "{name: buffer.cpu().clone() for name, buffer in model.named_buffers()}",
                "allocator.sleep(offload_tags=('weights',) if level == 1 else tuple())",
            ),
            lacks("NPUWorker.sleep", "all_reduce", "barrier"),
        ),
        "one rank sleeps alone: buffers are saved, both pools unmapped, nobody else is asked",
    ),
    Assumption(
        "sleep-keeps-graphs",
        _WORKER,
        (
            lacks("NPUWorker.sleep", "concrete_aclgraph_entries", "reset_all_graph_params"),
            lacks("NPUWorker.wake_up", "capture_model"),
        ),
        "without extra cleanup vllm-ascend replays its graphs after a wake: addresses stay",
    ),
    Assumption(
        "extra-cleanup-optional",
        _WORKER,
        (says("NPUWorker.sleep", "cleanup_enabled = rl_config.enabled and rl_config.sleep_mode_extra_cleanup"),),
        "its groups are destroyed only with an option that is refused",
        (RC,),
    ),
    Assumption(
        "wake-restores-buffers",
        _WORKER,
        (
            takes("NPUWorker.wake_up", "self", "tags"),
            says(
                "NPUWorker.wake_up",
                "allocator.wake_up(tags=tags)",
                "buffer.data.copy_(self._sleep_saved_buffers[name].data)",
                "if len(self._sleep_saved_buffers):",
            ),
        ),
        "the first wake writes the buffers, whatever its tags: it must be that of the weights",
    ),
    Assumption(
        "wake-keeps-layout",
        _WORKER,
        (lacks("NPUWorker.wake_up", "transpose"),),
        "0.23 swaps the expert weights to checkpoint layout when it wakes; 0.30 does not",
        (RC,),
    ),
    Assumption(
        "wake-refuses-nz",
        _WORKER,
        (says("NPUWorker.wake_up", "nz_mode = get_ascend_config().weight_nz_mode", "if nz_mode:"),),
        "weight_nz_mode must be 0",
    ),
    Assumption(
        "pool-tags",
        _WORKER,
        (
            says("NPUWorker.load_model", "context = allocator.use_memory_pool(tag='weights')"),
            says("NPUWorker.initialize_from_config", "self._maybe_get_memory_pool_context(tag='kv_cache')"),
        ),
        "weights and the backing of KV lie in the pools, nothing else does",
        (RC,),
    ),
    Assumption(
        "camem-no-state",
        _CAMEM,
        (
            lacks("CaMemAllocator", "is_asleep"),
            has("CaMemAllocator.get_instance"),
            takes("CaMemAllocator.sleep", "self", "offload_tags"),
            takes("CaMemAllocator.wake_up", "self", "tags"),
            says("CaMemAllocator.__init__", "self.pointer_to_data: dict[int, AllocationData] = {}"),
            says("AllocationData", "tag: str"),
            says("CaMemAllocator", "sleep_persistent_tag: str = 'sleep_persistent'"),
        ),
        "a second sleep or wake would unmap or map twice",
    ),
)

GRAPHS = (
    Assumption(
        "graph-table",
        _ACL,
        (
            says(
                "ACLGraphWrapper.__init__", "self.concrete_aclgraph_entries: dict[BatchDescriptor, ACLGraphEntry] = {}"
            ),
            says("ACLGraphWrapper.__call__", "entry = self.concrete_aclgraph_entries[batch_descriptor]"),
            says("ACLGraphWrapper.__call__", "validate_cudagraph_capturing_enabled()"),
        ),
        "the table of graphs is swapped; a graph is captured on a miss, and only where capturing is on",
    ),
    Assumption(
        "graph-params",
        _ACL,
        (
            says(
                "GraphParams",
                "events: dict[int, list[torch.npu.ExternalEvent]]",
                "workspaces: dict[int, torch.Tensor]",
                "handles: dict[int, list[torch_npu._C._NPUTaskGroupHandle]]",
                "attn_params: dict[int, list[tuple]]",
            ),
            says("set_graph_params", "raise ValueError('Graph parameters have already been set!')"),
            says("get_graph_params", "return _graph_params"),
        ),
        "attention parameters are one module global, swapped together with the graphs",
    ),
    Assumption(
        "graph-reset",
        _CLEANUP,
        (
            says(
                "AclGraphSleepWakeupManager.reset_all_graph_params",
                "cls.reset_graph_params(acl_graph._graph_params)",
                "wrapper.concrete_aclgraph_entries.clear()",
            ),
            says(
                "AclGraphSleepWakeupManager.clear_all_attention_workspaces",
                "cls.clear_attention_workspaces(acl_graph._graph_params)",
            ),
        ),
        "its clear and reset act on what is in use, so they come after the swap",
    ),
    Assumption(
        "capture-model",
        _RUNNER,
        (takes("NPUModelRunner.capture_model", "self"), says("NPUModelRunner.capture_model", ".capture_model(self)")),
        "capturing goes through vLLM's own loop over the dispatcher's keys",
    ),
    Assumption(
        "padding-by-the-dispatcher-s-list",
        "patch/worker/patch_cudagraph.py",
        (raw("num_tokens_padded = self._bs_to_padded_graph_size[num_tokens]"),),
        "a batch is padded to the next graph that is there where that list is replaced",
    ),
    Assumption(
        "compiled-code-runs-eagerly",
        "compilation/compiler_interface.py",
        (says("_configure_backend", "'force_eager': True"),),
        "compiled code captures no graph of its own; static kernels, which are built for one world, are refused",
    ),
    Assumption(
        "moe-is-one-opaque-operator",
        "ops/fused_moe/fused_moe.py",
        (says("AscendMoERunner.forward", "result = self._forward_entry("),),
        "compiled code does not look into the MoE layer, whose world changes",
        (RC,),
    ),
    Assumption(
        "capture-needs-compile-mode",
        _RUNNER,
        (says("NPUModelRunner._use_aclgraph", "self.compilation_config.mode == CompilationMode.VLLM_COMPILE"),),
        "compilation mode 0 would switch ACL graphs off in silence",
    ),
    Assumption(
        "block-tables",
        "worker/block_table.py",
        (
            says("MultiGroupBlockTable.__init__", "self.block_tables = ["),
            says("BlockTable.__init__", "self.block_table = self._make_buffer("),
            says("BlockTable.get_device_tensor", "self.block_table.gpu"),
        ),
        "block tables are saved and cleared around a capture, buffer by buffer (the table's own clear() calls a method "
        "that its buffer does not have)",
    ),
)

RUNNER = (
    Assumption(
        "runner-caches-dp",
        _RUNNER,
        (
            says(
                "NPUModelRunner.__init__",
                "self.dp_size = vllm_config.parallel_config.data_parallel_size",
                "self.dp_rank = vllm_config.parallel_config.data_parallel_rank",
            ),
        ),
        "both are written at a switch",
    ),
    Assumption(
        "dp-metadata-on-host",
        _RUNNER,
        (
            says(
                "NPUModelRunner._sync_metadata_across_dp",
                "if self.dp_size == 1:",
                "packed_tensor[0][self.dp_rank] = num_tokens",
                "dist.all_reduce(packed_tensor, group=get_dp_group().cpu_group)",
            ),
        ),
        "every step of every member meets on the DP coordinator's host group",
        (RC,),
    ),
    Assumption(
        "dummy-run",
        _RUNNER,
        (
            takes("NPUModelRunner._dummy_run", "self", "num_tokens", "uniform_decode", "is_graph_capturing"),
            says("NPUModelRunner._dummy_run", "if not is_graph_capturing:", "blk_table.slot_mapping.gpu.fill_(-1)"),
        ),
        "dummy steps are not counted as steps; warm-ups write into no slot",
    ),
    Assumption(
        "attention-metadata",
        "attention/attention_v1.py",
        (has("AscendMetadata.max_query_len"),),
        "the audit tells prefill from decode by it",
    ),
    Assumption(
        "dummy-batch",
        _WORKER,
        (
            takes("NPUWorker.execute_dummy_batch", "self"),
            says("NPUWorker.execute_dummy_batch", "uniform_decode=True"),
        ),
        "the trial step",
    ),
    Assumption(
        "v2-runner-by-variable",
        "patch/platform/patch_use_v2_model_runner.py",
        (says("_patched_use_v2_model_runner", "use_v2 = envs.VLLM_USE_V2_MODEL_RUNNER"),),
        "the V1 runner is chosen by the environment",
    ),
    Assumption(
        "config-closed",
        "ascend_config.py",
        (says("AscendConfig", "model_config = ConfigDict(extra='forbid')"), has("get_ascend_config")),
        "FlexFloor's settings cannot travel in additional_config",
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

ALL: tuple[Assumption, ...] = (*GROUPS, *MOE, *SELECTION, *MEMORY, *GRAPHS, *RUNNER, *OPTIONS, *TORCH)

VLLM: tuple[Symbol, ...] = (
    Symbol("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.capture_model", ("self",), "called: captures graphs"),
    Symbol("vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher.get_capture_descs", ("self",), "reads the keys set"),
    Symbol(
        "vllm.v1.cudagraph_dispatcher",
        "CudagraphDispatcher._compute_bs_to_padded_graph_size",
        ("self",),
        "its list of padded batch sizes is replaced where a world lacks graphs",
    ),
    Symbol("vllm.v1.worker.workspace", "unlock_workspace", (), "called before a capture"),
    Symbol("vllm.model_executor.layers.fused_moe.config", "FusedMoEConfig.ep_size", (), "read by vllm-ascend"),
)


def broken(tree: SourceTree, package: str, release: str = RC) -> dict[str, str]:
    """Assumptions of a package that do not hold in a tree: name -> what broke."""
    own = [a for a in ALL if a.package == package and release in a.releases]
    return {a.name: what for a in own if (what := a.broken(tree)) is not None}


def table() -> list[str]:
    """One row of docs/ascend.md an assumption: name, file, what stands on it, test, releases."""
    rows = []
    for a in ALL:
        where = ", ".join(a.releases) if a.package == "vllm_ascend" else TORCH_NPU
        test = f"test_contract.py::test_{a.package}"
        rows.append(f"| `{a.name}` | `{a.package}/{a.file}` | {a.why} | `{test}` | {where} |")
    return rows


def installed(distributions: Iterable[str] = ("vllm-ascend", "torch-npu")) -> dict[str, str | None]:
    """Version of each distribution, None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in distributions:
        try:
            found[name] = version(name).split("+")[0]
        except PackageNotFoundError:
            found[name] = None
    return found


def package_root(package: str) -> Path | None:
    """Where a package lies; it is not imported."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def check_installed() -> None:
    """Refuse packages that are not the ones that were read.

    Raises:
        RefusedError: vllm-ascend is missing.
        UpstreamChangedError: another release, or an assumption that does not hold.
    """
    release, root = installed()["vllm-ascend"], package_root("vllm_ascend")
    if release is None or root is None:
        raise RefusedError("vllm-ascend is not installed", remedy=f"pip install vllm-ascend=={RC}")
    if release not in TESTED:
        raise UpstreamChangedError("vllm-ascend", f"version {release}", "was not read", ", ".join(TESTED))
    for package in ("vllm_ascend", "torch_npu"):
        place = package_root(package)
        if place is None:
            raise RefusedError(f"{package} is not installed", remedy=f"pip install torch-npu=={TORCH_NPU}")
        for name, what in broken(SourceTree(place), package, release).items():
            raise UpstreamChangedError(package, name, what, ", ".join(TESTED))
    upstream.check(VLLM)
