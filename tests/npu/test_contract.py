"""The released packages say what the Ascend module relies on (issue 6, line 3); they are parsed, never imported."""

import ast
import re
import shutil
from pathlib import Path

import pytest

from flexfloor import exchange
from flexfloor.engine.devices import ascend_contract, ascend_unproven
from flexfloor.engine.devices.ascend_assumption import RC, READ, STABLE, TORCH_NPU
from flexfloor.engine.devices.ascend_contract import ALL, broken
from flexfloor.engine.devices.source_tree import SourceTree, takes
from flexfloor.errors import UpstreamChangedError

DEVICES = Path(ascend_contract.__file__).parent
DOCS = Path(__file__).parents[2] / "docs" / "ascend.md"
OWN = [a for a in ALL if a.package == "vllm_ascend"]


@pytest.mark.parametrize("assumption", OWN, ids=lambda a: a.name)
@pytest.mark.parametrize("release", READ)
def test_vllm_ascend(assumption, release, trees):
    """It holds in the releases that the table names, and in no other one: the table is true both ways."""
    what = assumption.broken(trees[release])
    if release in assumption.releases:
        assert what is None
    else:
        assert what is not None, f"{assumption.name} holds in {release} too: say so in the table"


@pytest.mark.parametrize("assumption", [a for a in ALL if a.package == "torch_npu"], ids=lambda a: a.name)
def test_torch_npu(assumption, torch_npu_tree):
    assert assumption.broken(torch_npu_tree) is None


def test_torch_2_10_has_the_same_helper(torch_tree):
    """vllm-ascend pins torch 2.10, which FlexFloor's other platforms do not run on."""
    names = ("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name")
    rule = takes("_new_process_group_helper", *names, "backend_options", "timeout")
    assert rule(torch_tree, "distributed/distributed_c10d.py") is None
    assert takes("_set_pg_timeout", "timeout", "group")(torch_tree, "distributed/distributed_c10d.py") is None


def test_torch_npu_is_the_one_that_is_pinned(trees):
    for release in READ:
        text = (trees[release].root.parent / "pyproject.toml").read_text(encoding="utf-8")
        assert f'"torch-npu=={TORCH_NPU}"' in text, release


def test_task_queue_2_is_rejected_while_a_graph_is_captured(torch_npu_tree):
    library = (torch_npu_tree.root / "lib" / "libtorch_npu.so").read_bytes()
    assert b"Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture" in library
    assert b"hccl_buffer_size" in library


def test_the_rules_of_the_exchange_are_the_package_s(trees):
    """The selector of A2, run from its syntax tree, picks what `flexfloor.exchange` says for every size."""
    node = trees[RC].node("ascend_forward_context.py", "_select_capacity_and_expert_density_moe_comm_method")
    code = compile(ast.Module([_bare(node)], []), "selector", "exec")

    class MoECommType:
        MC2, ALLGATHER = exchange.Exchange.MC2, exchange.Exchange.ALLGATHER

    space = {"MoECommType": MoECommType}
    exec(code, space)
    select = space[node.name]
    for experts in (64, 128, 256, 384, 400):
        for ep in (2, 4, 8, 15, 16, 24, 32, 64):
            for tokens, capacity in ((1, 64), (64, 64), (65, 64), (512, 512)):
                config = _config(experts, ep)
                assert select(tokens, config, capacity) is exchange.picked("ascend-a2", ep, experts, tokens, capacity)


def _bare(node):
    for arg in (*node.args.args, *node.args.kwonlyargs):
        arg.annotation = None
    node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
    node.returns = None
    return ast.fix_missing_locations(node)


class _Model:
    def __init__(self, experts):
        self._experts = experts

    def get_num_experts(self):
        return self._experts


def _config(experts, ep):
    class Parallel:
        world_size_across_dp, pipeline_parallel_size = ep, 1

    class Config:
        model_config, parallel_config = _Model(experts), Parallel

    return Config


# -- a change is found ------------------------------------------------------------------------


CHANGES = [
    ("ops/fused_moe/moe_comm_method.py", "def setup_moe_comm_method(", "def build_methods(", "comm-methods-table"),
    ("ops/fused_moe/token_dispatcher.py", "self.ep_world_size =", "self.ep_size_ =", "mc2-dispatcher-frozen"),
    ("patch/worker/patch_distributed.py", "self.rank_in_group =", "self.place =", "coordinator-fields"),
    ("worker/worker.py", "def wake_up(self, tags", "def wake_up(self, names", "wake-restores-buffers"),
    ("compilation/acl_graph.py", "concrete_aclgraph_entries", "graph_entries", "graph-table"),
    ("compilation/acl_graph.py", "attn_params: dict", "attention: dict", "graph-params"),
    ("device_allocator/camem.py", "pointer_to_data", "allocations", "camem-no-state"),
    ("ops/fused_moe/routed_experts.py", "self.log2phy[topk_ids]", "self.to_physical[topk_ids]", "log2phy-in-routing"),
    ("worker/model_runner_v1.py", "self.dp_rank = vllm_config", "self.rank_in_dp = vllm_config", "runner-caches-dp"),
    ("ascend_forward_context.py", "ep_world_size >= 16", "ep_world_size >= 8", "selection-reads-config"),
    ("ascend_config.py", "enable_fused_mc2: int", "fused_mc2: int", "options-exist"),
]


@pytest.mark.parametrize(("file", "old", "new", "name"), CHANGES, ids=[c[3] for c in CHANGES])
def test_a_renamed_symbol_is_found(file, old, new, name, copied):
    assert broken(copied(), "vllm_ascend") == {}
    tree = copied(file)
    place = tree.root / file
    text = place.read_text(encoding="utf-8")
    assert old in text
    place.write_text(text.replace(old, new), encoding="utf-8")
    found = broken(tree, "vllm_ascend")
    assert name in found
    assert file in found[name]


@pytest.fixture
def copied(trees, tmp_path):
    """Makes trees over a copy of the package; what is not named keeps its parsed form."""
    copy = tmp_path / "vllm_ascend"
    for part in {a.file for a in OWN}:
        source = trees[RC].root / part
        if source.is_file():
            (copy / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy / part)

    def make(changed=None):
        tree = SourceTree(copy)
        tree._modules = {file: node for file, node in trees[RC]._modules.items() if file != changed}
        return tree

    return make


def test_start_refuses_a_changed_package(copied, monkeypatch):
    copy = copied().root
    monkeypatch.setattr(ascend_contract, "installed", lambda: {"vllm-ascend": RC, "torch-npu": TORCH_NPU})
    roots = {"vllm_ascend": copy, "torch_npu": copy}
    monkeypatch.setattr(ascend_contract, "package_root", roots.get)
    file = copy / "device_allocator" / "camem.py"
    file.write_text(file.read_text(encoding="utf-8").replace("def wake_up(", "def wake("), encoding="utf-8")
    with pytest.raises(UpstreamChangedError, match=r"camem-no-state .*wake_up"):
        ascend_contract.check_installed()


def test_start_refuses_the_release_that_was_only_read(monkeypatch, tmp_path):
    monkeypatch.setattr(ascend_contract, "installed", lambda: {"vllm-ascend": STABLE, "torch-npu": TORCH_NPU})
    monkeypatch.setattr(ascend_contract, "package_root", lambda name: tmp_path)
    with pytest.raises(UpstreamChangedError, match=rf"version {re.escape(STABLE)}"):
        ascend_contract.check_installed()


# -- names in comments, tables and docs ----------------------------------------------------------


def _tags(kind):
    found = set()
    for file in DEVICES.glob("ascend*.py"):
        text = " ".join(file.read_text(encoding="utf-8").split())
        for run in re.findall(rf"\({kind}: ([a-z0-9, -]+)\)", text):
            found |= set(run.split(", "))
    return found


def test_names_are_unique():
    names = [a.name for a in ALL] + [u.name for u in ascend_unproven.ALL]
    assert len(names) == len(set(names))


def test_every_tag_is_an_entry():
    assert _tags("contract") <= {a.name for a in ALL}
    assert _tags("contract")


def test_every_unproven_assumption_is_tagged_in_code_and_the_other_way_round():
    assert _tags("unproven") == {u.name for u in ascend_unproven.ALL}


def test_the_docs_list_every_assumption():
    text = DOCS.read_text(encoding="utf-8")
    for row in ascend_contract.table():
        assert row in text, f"docs/ascend.md lacks: {row}"
    for unproven in ascend_unproven.ALL:
        assert f"`{unproven.name}`" in text, unproven.name
        assert f"| `{unproven.command}` | {unproven.shows} |" in text, unproven.name
