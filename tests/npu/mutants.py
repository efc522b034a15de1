"""Wrong versions of the Ascend module, one rule broken each; `bed.py` applies one before a rank begins.

`RULES` says which rule of the stand-in rejects it. "error" stands for an error that the module itself raises.
"""

import torch

from flexfloor.engine.devices import ascend_experts, ascend_graphs, ascend_groups
from flexfloor.engine.devices.ascend_experts import AscendWiring
from flexfloor.engine.devices.ascend_graphs import AclGraphs
from flexfloor.engine.devices.ascend_memory import Pools
from flexfloor.engine.wiring import Wiring


def on_a2():
    """No mutant: the module as it is on A2, where four ranks exchange by all-gather over the DP group."""
    from vllm_ascend.device.hardware_profile import MoECommPolicy, profile

    profile.moe_comm_policy = MoECommPolicy.CAPACITY_AND_EXPERT_DENSITY


def keeps_one():
    """No mutant: the module as it is with room for the groups of one survivor set only."""
    from flexfloor.engine.devices import ascend

    ascend.KEPT_SETS = 1


ALL, RULES = {"none": lambda: None, "on-a2": on_a2, "keeps-one": keeps_one}, {}


def mutant(rule):
    def add(apply):
        name = apply.__name__.replace("_", "-")
        ALL[name], RULES[name] = apply, rule
        return apply

    return add


@mutant("weights-before-buffers")
def kv_wakes_first():
    tags = Pools.tags
    Pools.tags = lambda self: tags(self)[::-1]


@mutant("mapped-once")
def wake_without_tags_for_each_pool():
    def wake(self):
        for _ in self._asleep:
            self._worker.wake_up(None)
        self._asleep = []

    Pools.wake = wake


@mutant("mapped-once")
def half_a_wake_is_repeated():
    wake = Pools.wake

    def twice(self):
        asleep = list(self._asleep)
        wake(self)
        self._asleep = asleep
        wake(self)

    Pools.wake = twice


@mutant("no-subset-collective")
def mc2_coordinator_stays():
    coordinators = AscendWiring.coordinators
    fields = AscendWiring.world_fields
    AscendWiring.coordinators = lambda self: coordinators(self)[:2]
    AscendWiring.world_fields = lambda self, group, rank: fields(self, group, rank)[:2]
    rebuild = AscendWiring.rebuild

    def unchecked(self, size):
        self.coordinators = lambda: coordinators(self)
        rebuild(self, size)
        del self.coordinators

    AscendWiring.rebuild = unchecked
    ascend_experts._check_dispatcher = lambda *args: None


@mutant("no-subset-collective")
def dp_device_group_stays():
    fields = AscendWiring.world_fields

    def kept(self, group, rank):
        dp, ep, mc2 = fields(self, group, rank)
        return (
            {**dp, "device_group": self.coordinators()[0].device_group},
            ep,
            {
                **mc2,
                "device_group": self.coordinators()[2].device_group,
            },
        )

    AscendWiring.world_fields = kept


@mutant("the-full-world-stays")
def coordinators_are_destroyed_at_a_switch():
    point = AscendWiring.point

    def destroying(self, group, maps, rank):
        for coordinator in self.coordinators():
            coordinator.destroy_hccl()
        point(self, group, maps, rank)

    AscendWiring.point = destroying


@mutant("opened-in-staging")
def communicators_open_by_themselves():
    ascend_groups.open_communicator = lambda device, cpu: None


@mutant("unique-names")
def names_by_kind_only():
    ascend_groups.hccl_name = lambda kind, name: f"{kind}_ff"


@mutant("buffer-sizes")
def mc2_gets_a_buffer():
    options = ascend_groups.options

    def sized(kind, name):
        found = options(kind, name)
        found.hccl_config["hccl_buffer_size"] = 200
        return found

    ascend_groups.options = sized


@mutant("no-lost-reads")
def tables_are_not_rewritten():
    AscendWiring.woken = lambda self: None
    set_tables = AscendWiring.set_tables

    def unless_the_same(self, tables):
        if tables is not self.__dict__.get("tables"):
            set_tables(self, tables)

    AscendWiring.set_tables = unless_the_same


@mutant("no-lost-reads")
def dispatcher_ids_are_not_rewritten():
    AscendWiring._rewrite_dispatchers = lambda self: None


@mutant("no-lost-reads")
def dense_weights_stay_lost():
    from flexfloor.engine.travel import Travel

    Travel._dense = lambda self: []


@mutant("derived-weights")
def router_weights_are_not_derived():
    AscendWiring.refilled = lambda self: None
    from flexfloor.engine.travel import Travel

    dense = Travel._dense
    Travel._dense = lambda self: [t for t in dense(self) if t.dtype is not torch.float32 or t.dim() < 2]


@mutant("nothing-written-asleep")
def tables_are_written_asleep():
    init = AscendWiring.__init__
    AscendWiring.__init__ = lambda self, worker, experts, asleep: init(self, worker, experts, lambda: False)


@mutant("reset-before-capture")
def parameters_are_not_reset():
    AclGraphs._reset = lambda self: None
    ascend_graphs._empty = lambda params: params


@mutant("eager-or-captured")
def reset_before_the_swap():
    ready = AclGraphs.ready

    def early(self, group, load, **lean):
        self._reset()
        return ready(self, group, load, **lean)

    AclGraphs.ready = early


@mutant("graphs-and-parameters")
def parameters_are_not_swapped():
    put = AclGraphs.use

    def half(self, graphs):
        before = self._module._graph_params
        put(self, graphs)
        self._module._graph_params = before

    AclGraphs.use = half


@mutant("eager-or-captured")
def the_full_world_s_graphs_are_freed():
    def settled(self):
        aside, self._aside = self._aside, None
        if aside is not None:
            keys = set(aside.keys)
            self._free(aside)
            aside.keys = keys

    AclGraphs.settled = settled


@mutant("equal-recapture-lists")
def every_survivor_captures_its_own_list():
    ready = AclGraphs.ready
    ascend_graphs.agree = lambda group, sizes: None

    def own(self, group, load, **lean):
        import torch.distributed as dist

        return ready(self, group, load if dist.get_rank() != group.ranks[0] else 1, **lean)

    AclGraphs.ready = own


@mutant("error")
def lists_differ_and_the_members_compare_them():
    ready = AclGraphs.ready

    def own(self, group, load, **lean):
        import torch.distributed as dist

        return ready(self, group, load if dist.get_rank() != group.ranks[0] else 1, **lean)

    AclGraphs.ready = own


@mutant("block-tables")
def block_tables_are_not_cleared():
    import contextlib

    AclGraphs._without_blocks = lambda self: contextlib.nullcontext()


@mutant("dp-metadata")
def runner_keeps_its_dp_rank():
    def set_dp(self, size, rank):
        Wiring.set_dp(self, size, rank)
        self.runner.dp_size = size

    AscendWiring.set_dp = set_dp


@mutant("dispatchers")
def dispatchers_are_only_refreshed():
    def rebuild(self, size):
        for layer in self.experts.layers:
            self.set_parallel(layer, self.parallel_of(layer, size))
        known = self.kernels()
        for (kind, _), method in list(known.items()):
            _methods()[kind, (8, self.tables.rows)] = method
            if hasattr(method.token_dispatcher, "refresh_hccl_group"):
                method.token_dispatcher.refresh_hccl_group()

    AscendWiring.rebuild = rebuild


def _methods():
    from vllm_ascend.ops.fused_moe.moe_comm_method import _MoECommMethods

    return _MoECommMethods


@mutant("active-rows")
def all_rows_are_shown():
    narrow = ascend_experts.narrow
    ascend_experts.narrow = lambda layer, tensors, rows: narrow(layer, tensors, 1 << 20)


@mutant("map-by-physical-id")
def map_by_logical_id():
    of = ascend_experts.Tables.of.__func__

    def logical(cls, maps, ranks, rank):
        found = of(cls, maps, ranks, rank)
        return cls(torch.tensor(maps[rank], dtype=torch.int32), found.log2phy, found.rows)

    ascend_experts.Tables.of = classmethod(logical)


@mutant("every-expert-found")
def log2phy_stays():
    of = ascend_experts.Tables.of.__func__

    def identity(cls, maps, ranks, rank):
        found = of(cls, maps, ranks, rank)
        return cls(found.row_of, torch.arange(len(found.log2phy), dtype=torch.int32), found.rows)

    ascend_experts.Tables.of = classmethod(identity)


@mutant("error")
def selection_sees_the_configured_world():
    """On A2 the configured world of 16 would pick MC2 for survivors that are fewer."""
    import vllm_ascend.ascend_forward_context as context
    from vllm_ascend.ascend_forward_context import MoECommType
    from vllm_ascend.device.hardware_profile import MoECommPolicy, profile

    profile.moe_comm_policy = MoECommPolicy.CAPACITY_AND_EXPERT_DENSITY
    context.select_moe_comm_method = lambda *args, **kwargs: MoECommType.MC2
