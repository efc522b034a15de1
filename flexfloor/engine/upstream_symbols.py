"""Every private symbol of vLLM and torch that FlexFloor patches or relies on, and the versions it was tested with."""

from __future__ import annotations

from typing import NamedTuple

VLLM_TESTED = ("0.30.0",)
TORCH_TESTED = "2.11 to 2.13"


class Symbol(NamedTuple):
    """One symbol, the parameters we count on, and why we need it."""

    module: str
    name: str
    parameters: tuple[str, ...]
    why: str


_CORE = "vllm.v1.engine.core"
_MOE = "vllm.model_executor.layers.fused_moe"
_STATE = "vllm.distributed.parallel_state"

COMMON: tuple[Symbol, ...] = (
    Symbol(_CORE, "DPEngineCoreProc.run_busy_loop", ("self",), "patched: builds the session after start-up"),
    Symbol(
        _CORE,
        "DPEngineCoreProc._has_global_unfinished_reqs",
        ("self", "local_unfinished"),
        "patched: the DP sync point is where ranks agree",
    ),
    Symbol(_CORE, "EngineCore.execute_dummy_batch", ("self",), "patched: counted; parked ranks run none"),
    Symbol(_CORE, "EngineCoreProc._process_engine_step", ("self",), "patched: parked and held ranks do not step"),
    Symbol(_CORE, "EngineCore.step_with_batch_queue", ("self",), "called: batches in flight are taken in"),
    Symbol(
        "vllm.v1.core.sched.interface",
        "SchedulerInterface.has_requests",
        ("self",),
        "hidden for a moment: batches in flight are taken in and none is scheduled",
    ),
    Symbol(_CORE, "DPEngineCoreProc.add_request", ("self", "request", "request_wave"), "patched: counts arrivals"),
    Symbol(
        "vllm.v1.engine.core_client",
        "AsyncMPClient._call_utility_async",
        ("self", "method", "args", "engine"),
        "called: one utility call an engine",
    ),
    Symbol(
        _STATE,
        "GroupCoordinator.__init__",
        (
            "self",
            "group_ranks",
            "local_rank",
            "torch_distributed_backend",
            "use_device_communicator",
            "use_message_queue_broadcaster",
            "group_name",
            "use_all2all",
        ),
        "its fields are swapped in place",
    ),
    Symbol(_STATE, "get_dp_group", (), "read: the live DP coordinator"),
    Symbol(_STATE, "get_ep_group", (), "read: the live EP coordinator"),
    Symbol(
        f"{_MOE}.config",
        "FusedMoEParallelConfig.make",
        ("tp_size_", "pcp_size_", "dp_size_", "sp_size_", "vllm_parallel_config"),
        "called: the smaller world's MoE configuration",
    ),
    Symbol(
        f"{_MOE}.all2all_utils",
        "maybe_make_prepare_finalize",
        ("moe", "quant_config", "routing_tables", "allow_new_interface"),
        "called: dispatch and combine of the smaller world",
    ),
    Symbol(
        f"{_MOE}.modular_kernel",
        "FusedMoEKernelModularImpl.__init__",
        ("self", "prepare_finalize", "fused_experts"),
        "its fields are swapped in place",
    ),
    Symbol(
        f"{_MOE}.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod.create_weights",
        ("self", "layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"),
        "patched: spare expert rows are allocated with the weights",
    ),
    Symbol(
        "vllm.v1.core.kv_cache_utils",
        "FreeKVCacheBlockQueue.__init__",
        ("self", "blocks"),
        "called: the free blocks of a step's KV",
    ),
    Symbol("vllm.utils.gc_utils", "freeze_gc_heap", (), "called: no full collection holds tokens back"),
    Symbol("vllm.utils", "is_moe_layer", ("module",), "called: finds the MoE layers"),
    Symbol(
        "torch.distributed.distributed_c10d",
        "_new_process_group_helper",
        (
            "group_size",
            "group_rank",
            "global_ranks_in_group",
            "backend",
            "store",
            "group_name",
            "backend_options",
            "timeout",
        ),
        "called: groups of some ranks under a name all of them agree on",
    ),
    Symbol(
        "torch.distributed.distributed_c10d",
        "_set_pg_timeout",
        ("timeout", "group"),
        "called: a short deadline for what is joint in a transition",
    ),
)

CPU: tuple[Symbol, ...] = (
    Symbol(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._sample",
        ("self", "logits", "spec_decode_metadata"),
        "patched on CPUModelRunner: a seeded request in chunked prefill winds its generator back",
    ),
    Symbol(
        "vllm.distributed.device_communicators.base_device_communicator",
        "DeviceCommunicatorBase.all_gatherv",
        ("self", "input_", "dim", "sizes"),
        "patched on CpuCommunicator: not implemented there",
    ),
    Symbol(
        "vllm.distributed.device_communicators.base_device_communicator",
        "DeviceCommunicatorBase.reduce_scatterv",
        ("self", "input_", "dim", "sizes"),
        "patched on CpuCommunicator: not implemented there",
    ),
    Symbol(
        f"{_MOE}.experts.cpu_moe",
        "CPUUnquantizedExperts.apply",
        (
            "self",
            "output",
            "hidden_states",
            "w1",
            "w2",
            "topk_weights",
            "topk_ids",
            "activation",
            "global_num_experts",
            "expert_map",
            "a1q_scale",
            "a2_scale",
            "workspace13",
            "workspace2",
            "expert_tokens_meta",
            "apply_router_weight_on_input",
        ),
        "patched: ignores expert_map and reads out of range",
    ),
    Symbol(
        f"{_MOE}.experts.cpu_moe",
        "CPUUnquantizedExperts.workspace_shapes",
        ("self", "M", "N", "K", "topk", "global_num_experts", "local_num_experts", "expert_tokens_meta", "activation"),
        "patched in verification mode: one output row a top-k slot",
    ),
    Symbol(
        "vllm._custom_ops",
        "cpu_fused_moe",
        ("out", "input", "w13", "w2", "w13_bias", "w2_bias", "topk_weights", "topk_ids", "act", "isa", "skip_weighted"),
        "called: the expert kernel",
    ),
)

CUDA: tuple[Symbol, ...] = (
    Symbol(
        "vllm.compilation.cuda_graph",
        "CUDAGraphWrapper.__call__",
        ("self", "args", "kwargs"),
        "patched: replayed steps are counted; its table of graphs is swapped",
    ),
    Symbol(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._dummy_run",
        ("self", "num_tokens", "cudagraph_runtime_mode", "uniform_decode", "is_graph_capturing"),
        "patched: dummy steps are not counted as steps",
    ),
    Symbol(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._warmup_and_capture",
        ("self", "desc", "cudagraph_runtime_mode", "num_warmups", "profiler"),
        "called: captures one decode batch size; its profiler is entered between warm-up and capture",
    ),
    Symbol(
        "vllm.v1.worker.gpu_model_runner",
        "coordinate_batch_across_dp",
        ("num_tokens_unpadded", "parallel_config", "num_tokens_padded", "uniform_decode", "cudagraph_mode"),
        "patched: a step that another rank made eager is told from one that lacks its graph",
    ),
    Symbol(
        "vllm.v1.cudagraph_dispatcher",
        "CudagraphDispatcher._compute_bs_to_padded_graph_size",
        ("self",),
        "its list of padded batch sizes is replaced where a world lacks graphs",
    ),
    Symbol(
        "vllm.v1.worker.gpu_worker",
        "Worker.determine_available_memory",
        ("self",),
        "patched: KV may take what the spare rows of the full world leave",
    ),
    Symbol(
        "vllm.v1.worker.gpu_worker",
        "Worker.reload_weights",
        ("self", "args", "kwargs"),
        "patched: all expert rows have memory while it writes them",
    ),
    Symbol(
        "vllm.device_allocator.cumem",
        "CuMemAllocator.wake_up",
        ("self", "tags"),
        "its table of allocations is divided further: parts of weights and KV have no memory for a while",
    ),
    Symbol(
        "vllm.device_allocator.cumem",
        "CuMemAllocator.use_memory_pool",
        ("self", "tag"),
        "called: the MoE workspace sleeps with KV",
    ),
    Symbol(
        "vllm.v1.worker.workspace",
        "WorkspaceManager._ensure_workspace_size",
        ("self", "required_bytes"),
        "patched: the MoE workspace sleeps with KV",
    ),
    Symbol("vllm.v1.worker.gpu_worker", "Worker.sleep", ("self", "level"), "called: one rank sleeps alone"),
    Symbol("vllm.v1.worker.gpu_worker", "Worker.wake_up", ("self", "tags"), "called: one rank wakes alone"),
    Symbol(
        "vllm.distributed.device_communicators.cuda_communicator",
        "CudaCommunicator.__init__",
        ("self", "cpu_group", "device", "device_group", "unique_name", "use_all2all"),
        "called: the communicator of a smaller world",
    ),
    Symbol(
        "vllm.distributed.device_communicators.pynccl",
        "PyNcclCommunicator.send",
        ("self", "tensor", "dst", "stream"),
        "called: rows are sent",
    ),
    Symbol(
        "vllm.distributed.device_communicators.pynccl",
        "PyNcclCommunicator.recv",
        ("self", "tensor", "src", "stream"),
        "called: rows are received",
    ),
    Symbol("vllm.distributed.parallel_state", "graph_capture", ("device",), "called: the stream of a capture"),
    Symbol("vllm.v1.worker.workspace", "current_workspace_manager", (), "read: graphs hold the workspace's address"),
    Symbol(
        f"{_MOE}.experts.triton_moe",
        "TritonExperts.workspace_shapes",
        ("self", "M", "N", "K", "topk"),
        "patched in verification mode: sums of float64",
    ),
    Symbol(
        f"{_MOE}.experts.triton_moe",
        "TritonExperts.moe_sum",
        ("self", "input", "output"),
        "patched in verification mode: slots are summed exactly",
    ),
)

COMBINE: tuple[Symbol, ...] = tuple(
    Symbol(
        f"{_MOE}.prepare_finalize.{module}",
        f"{name}.finalize",
        (
            "self",
            "output",
            "fused_expert_output",
            "topk_weights",
            "topk_ids",
            "apply_router_weight_on_input",
            "weight_and_reduce_impl",
        ),
        "patched in verification mode: sums that do not depend on the EP size",
    )
    for module, name in (
        ("naive_dp_ep", "MoEPrepareAndFinalizeNaiveDPEPModular"),
        ("no_dp_ep", "MoEPrepareAndFinalizeNoDPEPModular"),
    )
)

DRIVER: tuple[Symbol, ...] = tuple(
    Symbol(module, "get_mp_context", (), "replaced while vLLM starts its processes: they end with the server")
    for module in ("vllm.v1.engine.utils", "vllm.v1.engine.coordinator")
)
