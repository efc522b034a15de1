"""What only an Ascend device can show. Nothing here has been seen to hold.

Comments in the module name an entry as ``unproven: NAME``; docs/ascend.md lists, in order, how an engineer with
devices checks each.
"""

from __future__ import annotations

from typing import NamedTuple


class Unproven(NamedTuple):
    """One assumption about a device.

    Attributes:
        name: its name in comments and docs.
        what: what is assumed.
        command: what to run.
        shows: what must be printed.
    """

    name: str
    what: str
    command: str
    shows: str


def _test(name: str) -> str:
    return f"python -m pytest tests/npu/test_device.py -k {name} -s"


ALL: tuple[Unproven, ...] = (
    Unproven(
        "plugin-before-worker-patches",
        "the plugin may import vLLM's modules before vllm-ascend patches the worker",
        _test("test_engine_starts"),
        "`engine ready: 4 ranks`",
    ),
    Unproven(
        "subgroup-without-others",
        "an HCCL group is made by some ranks while the others do something else",
        _test("test_group_of_some_ranks"),
        "`all_reduce over (0, 1): 1.0`, and ranks 2 and 3 end without having taken part",
    ),
    Unproven(
        "hccl-name-opens-communicator",
        "asking for a communicator's name makes it, jointly over the group",
        _test("test_group_of_some_ranks"),
        "`communicator ep_ff_...` on ranks 0 and 1, within the transition's deadline",
    ),
    Unproven(
        "hccl-destroy-is-local",
        "a rank destroys a group without the others, and the full world's groups still work",
        _test("test_destroy_one_group"),
        "`full world after destroy: 6.0`",
    ),
    Unproven(
        "p2p-beside-mc2",
        "rows travel on their own communicator while MC2's exists",
        _test("test_rows_travel"),
        "`rows equal: True`",
    ),
    Unproven(
        "grouped-matmul-rows",
        "grouped matmul takes as many weights as groups, and a parameter that shows E/W rows of a larger tensor serves",
        _test("test_narrowed_weights"),
        "`difference to a tensor of E/W rows: 0.0`",
    ),
    Unproven(
        "one-rank-sleeps",
        "level 2 on one rank frees weights and KV and leaves the others' collectives working",
        _test("test_one_rank_sleeps"),
        "`released` above 0.9 of weights and KV",
    ),
    Unproven(
        "graphs-after-wake",
        "graphs captured before a level-2 sleep replay the same values after wake, refill and rewritten tables",
        _test("test_graphs_after_wake"),
        "`tokens equal: True`",
    ),
    Unproven(
        "recapture",
        "a survivor set captures anew while the full world's graphs are kept, within the device's streams",
        _test("test_recapture"),
        "`captured` lists equal on all survivors, no stream-resource error",
    ),
)
