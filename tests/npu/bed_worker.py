"""A worker of four in the full world, as vllm-ascend leaves it: loaded into the pool, graphs captured.

The model reads what a step reads and meets where a step meets; it computes nothing.
"""

import dataclasses
import types

import journal
import torch
import torch.distributed as dist

RANKS, EXPERTS, HIDDEN = 4, 8, 4
BUCKETS = (1, 2, 4, 8)


class MoERunnerInterface(torch.nn.Module):
    """vLLM tells MoE layers by this base class's name."""


class Experts(torch.nn.Module):
    log2phy = None
    _ascend_expert_map = None

    @property
    def ascend_expert_map(self):
        return self._ascend_expert_map


class Layer(MoERunnerInterface):
    def __init__(self, index, rank):
        from vllm_ascend.ops.fused_moe.routed_experts import AscendUnquantizedFusedMoEMethod

        super().__init__()
        self.index, rows = index, EXPERTS // RANKS
        self.moe_config = Config(rows)
        self._quant_method = AscendUnquantizedFusedMoEMethod(self.moe_config)
        self.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.bfloat16)
        torch.nn.init.constant_(self.gate.weight, 0.5 + index)
        self.gate.register_parameter("weight_fp32", torch.nn.Parameter(self.gate.weight.data.float()))
        self.experts_ = experts = Experts()
        experts.moe_config, experts.local_num_experts = self.moe_config, rows
        experts.expert_map_manager = types.SimpleNamespace(_local_num_experts=rows, moe_parallel_config=None)
        self._quant_method.create_weights(
            layer=experts,
            num_experts=rows,
            hidden_size=HIDDEN,
            intermediate_size_per_partition=2 * HIDDEN,
            params_dtype=torch.float32,
        )
        for row in range(rows):
            experts.w13_weight[row] = experts.w2_weight[row] = rank * rows + row
        linear = torch.full((EXPERTS,), -1, dtype=torch.int32)
        linear[rank * rows : (rank + 1) * rows] = torch.arange(rows, dtype=torch.int32)
        experts.__dict__["_ascend_expert_map"] = linear
        experts.register_buffer("saved_by_sleep", torch.full((3,), 7.0 + index))

    @property
    def routed_experts(self):
        return self.experts_


class Config:
    """FusedMoEConfig, as far as it is read."""

    num_experts, sp_size, experts_per_token = EXPERTS, 1, 2
    swiglu_limit = swiglu_alpha = swiglu_beta = None
    is_act_and_mul, has_bias = True, False

    def __init__(self, rows):
        self.num_local_experts, self.moe_parallel_config = rows, None

    @property
    def ep_size(self):
        return self.moe_parallel_config.ep_size


class Model(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(index, rank) for index in range(2))
        self.head = torch.nn.Parameter(torch.full((HIDDEN,), 3.0), requires_grad=False)

    def forward(self, key):
        """Reads what a step reads, and meets where a step meets."""
        runner = self.runner
        from vllm.distributed import get_dp_group, get_ep_group
        from vllm_ascend.ascend_forward_context import MoECommType, select_moe_comm_method
        from vllm_ascend.distributed.parallel_state import get_mc2_group
        from vllm_ascend.ops.fused_moe.moe_comm_method import get_moe_comm_method

        for layer in self.layers:
            experts, config = layer.routed_experts, layer.moe_config
            size, place = get_ep_group().world_size, get_ep_group().rank_in_group
            rows = EXPERTS // size
            for name in ("ascend_expert_map", "log2phy", "w13_weight", "w2_weight", "saved_by_sleep"):
                runner.standin_read(name, getattr(experts, name))
            runner.standin_read("weight_fp32", layer.gate.weight_fp32)
            runner.standin_read("head", self.head)
            if experts.w13_weight.shape[0] != rows or experts.w2_weight.shape[0] != rows:
                journal.breaks("active-rows", f"{experts.w13_weight.shape[0]} rows are shown in a world of {size}")
            if not torch.equal(layer.gate.weight_fp32, layer.gate.weight.float()):
                journal.breaks("derived-weights", "the router's float32 weights are not its weights")
            kind = select_moe_comm_method(key.num_tokens, runner.vllm_config)
            method = get_moe_comm_method(kind, config)
            if method is None:
                journal.breaks("dispatchers", f"there is no {kind.name} method for this world")
                continue
            dispatcher, group = method.token_dispatcher, get_dp_group()
            if kind is MoECommType.ALLGATHER:
                if dispatcher.num_experts_local != rows:
                    journal.breaks("dispatchers", f"all-gather counts {dispatcher.num_experts_local} rows, not {rows}")
            else:
                group = get_mc2_group() if kind is MoECommType.MC2 else get_ep_group()
                name = group.device_group._get_backend(torch.device("npu")).hccl_name
                if dispatcher.moe_all_to_all_group_name != name:
                    journal.breaks("dispatchers", "a dispatcher holds another communicator")
                if kind is MoECommType.MC2 and (dispatcher.ep_world_size, dispatcher.ep_rank_id) != (size, place):
                    journal.breaks(
                        "dispatchers", f"MC2 holds rank {dispatcher.ep_rank_id} of {dispatcher.ep_world_size}"
                    )
            ids = [
                m.token_dispatcher.expert_ids_per_ep_rank
                for m in self.runner.standin_methods().values()
                if hasattr(m.token_dispatcher, "expert_ids_per_ep_rank")
            ]
            for table in ids:
                runner.standin_read("expert_ids_per_ep_rank", table)
            self._meet(group, kind.name)
        return key.num_tokens

    def _meet(self, group, what):
        """A collective of the members, on the group that the step uses."""
        members = self.runner.members
        if len(members) == 1:
            return
        for part in (group.device_group, group.cpu_group):
            ranks = tuple(dist.get_process_group_ranks(part))
            if ranks != members or tuple(group.ranks) != members:
                journal.breaks("no-subset-collective", f"{what} would meet {ranks}, the members are {members}")
                return
        backend = group.device_group._get_backend(torch.device("npu"))
        if not backend.opened and "_ff_" in backend.hccl_name:
            journal.breaks("opened-in-staging", f"{backend.hccl_name} would be made by a step")
        mine = torch.ones(1)
        dist.all_reduce(mine, group=group.device_group)
        assert int(mine) == len(members)


@dataclasses.dataclass(frozen=True)
class Key:
    num_tokens: int


class Buffer:
    def __init__(self):
        self.gpu = torch.arange(1, 9, dtype=torch.int32)
        self.cpu = self.gpu.clone()


def build(rank):
    """A worker in the full world, as vllm-ascend would leave it: loaded into the pool, graphs captured."""
    import vllm.distributed.parallel_state as state
    import vllm_ascend.ascend_forward_context as context
    from vllm.config import CUDAGraphMode, set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager
    from vllm_ascend.compilation import acl_graph
    from vllm_ascend.device_allocator.camem import CaMemAllocator
    from vllm_ascend.distributed import parallel_state as ascend_state
    from vllm_ascend.ops.fused_moe.moe_comm_method import _MoECommMethods, setup_moe_comm_method
    from vllm_ascend.patch.worker.patch_distributed import GroupCoordinatorPatch
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner
    from vllm_ascend.worker.worker import NPUWorker

    from flexfloor.engine.wiring import Wiring

    init_workspace_manager(torch.device("cpu"), 1)
    members = tuple(range(RANKS))
    alone = types.SimpleNamespace(world_size=1, rank_in_group=0, ranks=[rank])
    state._TP = state._PCP = alone
    parallel = Parallel(rank)
    config = types.SimpleNamespace(
        parallel_config=parallel,
        model_config=types.SimpleNamespace(
            enable_sleep_mode=True,
            enable_return_routed_experts=False,
            get_num_experts=lambda: EXPERTS,
            hf_text_config=types.SimpleNamespace(num_experts_per_tok=2),
        ),
        compilation_config=types.SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
            cudagraph_capture_sizes=list(BUCKETS),
            max_cudagraph_capture_size=max(BUCKETS),
        ),
        use_v2_model_runner=False,
        quant_config=None,
    )
    with set_current_vllm_config(config):
        for kind, module, name in (("dp", state, "_DP"), ("ep", state, "_EP"), ("mc2", ascend_state, "_MC2")):
            setattr(module, name, GroupCoordinatorPatch([list(members)], rank, "hccl", True, group_name=kind))
    context.set_mc2_tokens_capacity(config, max(BUCKETS), 1)
    model = Model(rank)
    runner = NPUModelRunner()
    model.__dict__["runner"] = runner
    for layer in model.layers:
        layer.moe_config.moe_parallel_config = Wiring.parallel_of(types.SimpleNamespace(config=config), layer, RANKS)
        layer._quant_method.process_weights_after_loading(layer.routed_experts)
        assert tuple(layer.routed_experts.w13_weight.shape) == (EXPERTS // RANKS, HIDDEN, 4 * HIDDEN)
    with set_current_vllm_config(config):
        setup_moe_comm_method(model.layers[-1].moe_config)
    runner.model = acl_graph.ACLGraphWrapper(model, config, CUDAGraphMode.FULL)
    runner.vllm_config, runner.parallel_config, runner.drafter = config, parallel, None
    runner.dp_size, runner.dp_rank, runner.members = RANKS, rank, members
    runner.uniform_decode_query_len = 1
    runner.standin_methods = lambda: _MoECommMethods
    runner.cudagraph_dispatcher = types.SimpleNamespace(
        cudagraph_keys={CUDAGraphMode.FULL: {Key(size) for size in BUCKETS}},
        _bs_to_padded_graph_size=[0, *(min(size for size in BUCKETS if size >= n) for n in range(1, max(BUCKETS) + 1))],
    )
    tables = types.SimpleNamespace(block_tables=[types.SimpleNamespace(block_table=Buffer())])
    tables.block_tables[0].block_table.gpu.zero_()
    runner.input_batch = types.SimpleNamespace(block_table=tables)
    runner.kv_caches = [(torch.zeros(16), torch.zeros(16)) for _ in model.layers]
    acl_graph.set_graph_params(list(BUCKETS))
    hold_all(CaMemAllocator.get_instance(), model, runner, _MoECommMethods)
    worker = NPUWorker()
    worker.model_runner, worker.vllm_config, worker.parallel_config = runner, config, parallel
    worker.device = torch.device("cpu")
    runner.capture_model()
    tables.block_tables[0].block_table = Buffer()
    return worker


class Parallel:
    enable_expert_parallel, all2all_backend, enable_eplb = True, "allgather_reducescatter", False
    world_size = pipeline_parallel_size = tensor_parallel_size = 1

    def __init__(self, rank):
        self.data_parallel_size, self.data_parallel_rank = RANKS, rank

    @property
    def world_size_across_dp(self):
        return self.world_size * self.data_parallel_size


def hold_all(allocator, model, runner, methods):
    """Everything that load made lies in the weights pool, saved by sleep or not; KV in its own."""
    from vllm_ascend.vllm_ascend_C import hold

    tensors = [p.data for p in model.parameters()] + list(model.buffers())
    for layer in model.layers:
        whole = layer.routed_experts.__dict__["flexfloor_rows"]
        tensors += [*whole, layer.routed_experts.log2phy, layer.routed_experts.ascend_expert_map]
    for method in methods.values():
        table = getattr(method.token_dispatcher, "expert_ids_per_ep_rank", None)
        tensors += [] if table is None else [table]
    for tensor in {t.untyped_storage().data_ptr(): t for t in sorted(tensors, key=torch.numel)}.values():
        hold(allocator, "weights", tensor)
    for pair in runner.kv_caches:
        for tensor in pair:
            hold(allocator, "kv_cache", tensor)
