"""Whole transitions of the Ascend module over a stand-in of torch_npu and the HCCL and ACL calls (issue 6, line 4).

What of vllm-ascend imports without a device runs as released: coordinators, HCCL options, communication methods and
dispatchers, selection, the sleep pool, sleep and wake, the graphs' reset (`standin/real.py`). The stand-in computes
nothing: it keeps a journal and knows the rules. The module as it is breaks none; each mutant breaks the rule that is
named for it.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from flexfloor.engine.devices.ascend_assumption import RC
from flexfloor.engine.devices.source_tree import has, says, takes

HERE = Path(__file__).parent
STANDIN = HERE / "standin"


def _mutants():
    """Names and rules, read and not imported: the stand-in must not enter this process."""
    tree = ast.parse((HERE / "mutants.py").read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            for call in node.decorator_list:
                found[node.name.replace("_", "-")] = call.args[0].value
    return found


RULES = _mutants()


@pytest.fixture(scope="session")
def runs(trees):
    """Mutant -> what each rank reported."""
    command = [sys.executable, str(HERE / "bed.py"), str(trees[RC].root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["mutant"]: line["ranks"] for line in lines}


@pytest.fixture
def journals(runs):
    return [rank["journal"] for rank in runs["none"]]


@pytest.mark.parametrize("name", ["none", "on-a2", "keeps-one"])
def test_the_module_breaks_no_rule(name, runs):
    for rank in runs[name]:
        assert rank["error"] is None
        assert rank["broken"] == []


@pytest.mark.parametrize("name", RULES)
def test_each_rule_rejects_its_mutant(name, runs):
    ranks, rule = runs[name], RULES[name]
    if rule == "error":
        assert any((rank["error"] or "").startswith("ProtocolError") for rank in ranks)
        return
    found = {what.split(":")[0] for rank in ranks for what in rank["broken"]}
    assert rule in found, f"{name} passed ({found}, {[rank['error'] for rank in ranks]})"


def test_the_scenario_reaches_every_world(journals):
    """4 -> 2 -> 1 -> 4, an undone shrink, 4 -> 2 with one graph and later a smaller one, a topology
    restore and wake_all, 4 -> 2 -> 4.
    """
    phases = [[entry[1] for entry in journal if entry[0] == "phase"] for journal in journals]
    shrink = ["stage", "switch", "capture"]
    assert phases[0] == [*shrink * 2, "restore", *shrink * 2, "smaller", "restore", "wake_all", *shrink, "restore"]
    assert all(phase == phases[0] for phase in phases)


def test_weights_wake_first_and_each_pool_once(journals):
    for journal in journals:
        moves = [tuple(entry) for entry in journal if entry[0] in ("sleep", "wake")]
        assert moves
        wanted = [("sleep", 2), ("wake", ["weights"]), ("wake", ["kv_cache"])]
        assert moves == [(a, b) for a, b in wanted * (len(moves) // 3)]


def test_survivors_capture_equal_lists_after_a_reset(journals):
    by_transition = {}
    for journal in journals:
        serial, was_reset = 0, True
        for entry in journal:
            if entry[0] == "phase":
                serial, was_reset = entry[2], entry[1] == "smaller"
            elif entry[0] == "reset":
                was_reset = True
            elif entry[0] == "capture" and serial:
                assert was_reset
                by_transition.setdefault(serial, []).append(tuple(entry[1]))
    for lists in by_transition.values():
        assert len(set(lists)) == 1
    first = [(lists[0], len(lists)) for _, lists in sorted(by_transition.items())]
    full = (4, 2, 1)
    assert first == [(full, 2), (full, 1), (full, 2), ((4,), 2), ((2,), 2), (full, 2)]


def test_groups_are_made_by_their_members_only_and_only_when_needed(journals):
    for rank, journal in enumerate(journals):
        made = [entry for entry in journal if entry[0] == "group"]
        assert all(rank in entry[2] for entry in made)
        sets = {tuple(entry[2]) for entry in made}
        assert (0, 1, 2, 3) in sets
        assert sets <= {(0, 1, 2, 3), (1, 3), (0, 2), (0, 1)}
    made = [(e[1].split("_")[0], e[3]) for e in journals[1] if e[0] == "group" and e[2] == [1, 3]]
    assert made == [("dp", 50), ("ep", 200), ("mc2", None)]  # kept: the second (1, 3) makes none


def test_what_is_kept_no_longer_is_destroyed_and_nothing_else(runs):
    for rank in runs["none"]:
        assert [entry[1] for entry in rank["journal"] if entry[0] == "destroy"] in ([], [[0, 2]] * 4)  # the undone set
    gone = [entry[1] for rank in runs["keeps-one"] for entry in rank["journal"] if entry[0] == "destroy"]
    assert [1, 3] in gone
    assert all(len(ranks) < 4 for ranks in gone)


def test_the_full_world_is_not_built_again(journals):
    for journal in journals:
        assert sum(entry[0] == "setup" and entry[1] == 4 for entry in journal) == 1


# -- the stand-in is what the packages are --------------------------------------------------------


def _definitions(tree, prefix=""):
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", None
            yield from _definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            own = node.name.startswith("_") and not node.name.startswith("__")
            known = node.name in ("_sync_metadata_across_dp", "_dummy_run", "_moe_config_key", "_get_token_dispatcher")
            if "standin" not in node.name and (known or not own):
                yield f"{prefix}{node.name}", [arg.arg for arg in node.args.args]


OWN = {"hold", "poison", "poisoned", "init_module", "python_unmap_and_release", "python_create_and_map"}
"""What the compiled extension has (camem.py imports the last three), and what plays it here."""

FILES = sorted(path for path in (STANDIN / "vllm_ascend").rglob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_stand_in_has_the_real_signatures(path, trees):
    file = str(path.relative_to(STANDIN / "vllm_ascend"))
    for name, parameters in _definitions(ast.parse(path.read_text(encoding="utf-8"))):
        if name in OWN:
            continue
        rule = (
            has(name)
            if parameters is None or (name.endswith("__init__") and parameters == ["self", "kwargs"])
            else None
        )
        rule = rule or takes(name, *parameters)
        assert rule(trees[RC], file) is None


def test_the_compiled_calls_are_those_of_the_pool(trees):
    rule = says("create_and_map", "python_create_and_map(*allocation_handle)")
    assert rule(trees[RC], "device_allocator/camem.py") is None
    rule = says("unmap_and_release", "python_unmap_and_release(*allocation_handle)")
    assert rule(trees[RC], "device_allocator/camem.py") is None
    assert says("", "HandleType = tuple[int, int, int, int]")(trees[RC], "device_allocator/camem.py") is None


def test_the_stand_in_of_torch_npu_is_small_and_real(torch_npu_tree):
    text = "".join(p.read_text(encoding="utf-8") for p in torch_npu_tree.root.rglob("*.py") if "npu" in p.parts)
    for name in ("mem_get_info", "synchronize", "current_device", "set_device", "empty_cache", "current_stream"):
        assert f"def {name}(" in text, name
    for name in ("Stream", "Event"):
        assert f"class {name}(" in text, name
    for name in ("wait_stream", "record", "query"):
        assert f"def {name}(self" in text, name
    lines = sum(len(p.read_text(encoding="utf-8").splitlines()) for p in STANDIN.rglob("*.py"))
    assert lines < 600
