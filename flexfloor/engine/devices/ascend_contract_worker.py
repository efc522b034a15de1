"""Assumptions about memory, graphs and the model runner; see :mod:`ascend_contract`."""

from __future__ import annotations

from flexfloor.engine.devices.ascend_assumption import RC, Assumption
from flexfloor.engine.devices.source_tree import has, lacks, raw, says, takes

_WORKER = "worker/worker.py"
_RUNNER = "worker/model_runner_v1.py"
_CAMEM = "device_allocator/camem.py"
_CLEANUP = "device_allocator/sleep_mem_optimized.py"
_ACL = "compilation/acl_graph.py"

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
