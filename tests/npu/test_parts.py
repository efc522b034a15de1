"""Parts of the Ascend module that need no stand-in."""

import sys
from types import SimpleNamespace

import pytest
import torch

from flexfloor.elastic import placement as rows_of
from flexfloor.elastic.placement import Placement
from flexfloor.engine.devices import ascend_groups, module_for
from flexfloor.engine.devices.ascend_experts import STORED, Tables, expose, narrow
from flexfloor.engine.devices.ascend_graphs import AclGraphs, GraphSet
from flexfloor.engine.devices.ascend_memory import Pools
from flexfloor.engine.devices.source_tree import SourceTree, absent, has, lacks, raw, says, takes
from flexfloor.errors import ProtocolError, RefusedError


@pytest.mark.parametrize("experts", [16, 128])
def test_tables_of_every_world_that_a_placement_reaches(experts):
    """Rank by rank: the physical id of an expert leads to the row that holds it."""
    placement = Placement.linear(experts, 8, experts)
    for after in ((1, 3, 4, 6), (3, 6), (6,)):
        placement, _ = rows_of.shrink(placement, list(after))
        maps = {rank: placement.expert_map(rank) for rank in after}
        rows = experts // len(after)
        for place, rank in enumerate(after):
            tables = Tables.of(maps, after, rank)
            assert tables.rows == rows
            for expert, physical in enumerate(tables.log2phy.tolist()):
                owner, row = after[physical // rows], physical % rows
                assert maps[owner][expert] == row
                assert tables.row_of[physical] == (row if owner == rank else -1)
            assert tables.row_of.tolist().index(0) == place * rows


@pytest.mark.parametrize(
    ("maps", "what"),
    [
        ({0: [0, 1, -1, -1], 1: [-1, -1, 0, 2]}, "rank 1 has the active rows"),
        ({0: [0, 1, -1, -1], 1: [0, 1, -1, -1]}, "active on two members or on none"),
    ],
)
def test_maps_that_are_no_placement(maps, what):
    with pytest.raises(ProtocolError, match=what):
        Tables.of(maps, (0, 1), 0)


def layer(rows, capacity, experts=8):
    weights = {
        name: torch.nn.Parameter(torch.arange(capacity * 6.0).view(capacity, 2, 3))
        for name in ("w13_weight", "w2_weight")
    }
    config = SimpleNamespace(num_experts=experts, num_local_experts=rows)
    there = torch.full((experts,), -1, dtype=torch.int32)
    return SimpleNamespace(**weights, moe_config=config, ascend_expert_map=there, log2phy=None)


def test_a_layer_shows_its_active_rows_and_keeps_the_rest(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(get_npu_format=lambda t: 2))
    one = layer(2, 4)
    expose(one)
    assert one.w13_weight.shape[0] == 2
    assert one.__dict__[STORED][0].shape[0] == 4
    assert one.log2phy.tolist() == list(range(8))
    kept = one.__dict__[STORED][0].data_ptr()
    one.w13_weight = torch.nn.Parameter(torch.ones(4, 2, 3))  # a reload makes new parameters, then copies into the old
    expose(one)
    assert one.w13_weight.shape[0] == 2
    assert one.__dict__[STORED][0].data_ptr() == kept
    narrow(one, one.__dict__[STORED], 4)
    assert one.w13_weight.data_ptr() == kept
    assert one.w13_weight.shape[0] == 4


def test_another_layout_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(get_npu_format=lambda t: 29))
    with pytest.raises(RefusedError, match=r"format 29.*weight_nz_mode: 0"):
        expose(layer(2, 4))


def test_a_map_of_another_kind_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(get_npu_format=lambda t: 2))
    one = layer(2, 4)
    one.log2phy = torch.arange(8)
    with pytest.raises(RefusedError, match="remove eplb_config"):
        expose(one)


def test_hccl_names_are_short_and_say_what_they_are():
    names = {ascend_groups.hccl_name(kind, "flexfloor0_world_7_" + "_".join(map(str, range(512)))) for kind in "ab"}
    assert len(names) == 2
    assert all(len(name) < 32 for name in names)
    assert ["mc2" in ascend_groups.hccl_name(kind, "x") for kind in ("dp", "ep", "mc2", "rows")] == [
        False,
        False,
        True,
        False,
    ]


def test_pools_sleep_once_and_a_wake_can_be_tried_again(monkeypatch):
    monkeypatch.setattr(Pools, "tags", lambda self: ["weights", "kv_cache"])
    calls, fail = [], [True]

    def wake_up(tags):
        if tags == ["kv_cache"] and fail[0]:
            raise RuntimeError("no memory")
        calls.append(tags)

    pools = Pools(SimpleNamespace(sleep=lambda level: calls.append(level), wake_up=wake_up))
    pools.wake()
    pools.sleep()
    with pytest.raises(ProtocolError, match="sleep already"):
        pools.sleep()
    with pytest.raises(RuntimeError):
        pools.wake()
    fail[0] = False
    pools.wake()
    assert calls == [2, ["weights"], ["kv_cache"]]


def test_buckets_reach_the_load_and_no_further():
    graphs = object.__new__(AclGraphs)
    graphs._keys = [SimpleNamespace(num_tokens=size) for size in (1, 2, 4, 8)]
    assert [key.num_tokens for key in graphs.buckets(3)] == [4, 2, 1]
    assert [key.num_tokens for key in graphs.buckets(8)] == [8, 4, 2, 1]
    assert [key.num_tokens for key in graphs.buckets(99)] == [8, 4, 2, 1]
    assert GraphSet(None).keys == set()


def test_the_platform_s_module():
    assert module_for("npu").name == "ascend"
    with pytest.raises(RefusedError, match=r"set engine.combine: stock"):
        module_for("npu").patch("invariant")
    with pytest.raises(RefusedError, match="vllm-ascend is not installed"):
        module_for("npu").patch("stock")


SOURCE = '''
LIMIT: int = 24


class Pool:
    """What it keeps."""

    tag = "x"

    def sleep(self, level, *, deep=False):
        if level  == 2:
            self.save( "all" )
'''


def test_reading_source(tmp_path):
    (tmp_path / "pool.py").write_text(SOURCE)
    (tmp_path / "pool.hpp").write_text("int sleep(int level);")
    tree = SourceTree(tmp_path)
    good = [
        has("Pool.sleep", "LIMIT", "Pool.tag"),
        absent("Pool.wake"),
        takes("Pool.sleep", "self", "level", "deep"),
        says("Pool.sleep", "self.save('all')", "if level == 2:"),
        says("", "LIMIT: int = 24"),
        lacks("Pool.sleep", "wake"),
    ]
    assert [rule(tree, "pool.py") for rule in good] == [None] * len(good)
    assert raw("int sleep(int level)")(tree, "pool.hpp") is None
    bad = [
        (has("Pool.wake"), "has no Pool.wake"),
        (absent("Pool.sleep"), "has Pool.sleep"),
        (takes("Pool.sleep", "level", "self"), "takes (self, level, deep)"),
        (takes("Pool", "self"), "has no function Pool"),
        (says("Pool.sleep", "self.save('some')"), "no longer says"),
        (lacks("Pool.sleep", "save"), "now says `save`"),
        (has("Pool"), None),
    ]
    for rule, what in bad:
        found = rule(tree, "pool.py")
        assert (found is None) if what is None else (what in found)
    assert has("Pool")(tree, "gone.py") == "gone.py is gone"
    assert raw("x")(tree, "gone.hpp") == "gone.hpp is gone"
