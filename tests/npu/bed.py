"""Whole transitions of the Ascend module over the stand-in: four processes, real ElasticWorld, real groups (gloo).

``python bed.py PACKAGE NAME ..`` runs the scenario once for each named mutant ("none": the module as it is; all without
a name) and prints one JSON line each: the rules that were broken, by rank, and what ended a rank early. PACKAGE is the
folder of the released vllm_ascend. One import of vLLM serves all runs.
"""

import dataclasses
import gc
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "standin"), str(HERE)]

import journal  # noqa: E402
import real  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch_npu  # noqa: E402
from bed_worker import EXPERTS, RANKS, build  # noqa: E402

DEADLINE_S = 10.0


# -- the scenario --------------------------------------------------------------------------------


class Run:
    """One rank of the scenario."""

    def __init__(self, rank, mutant):
        from flexfloor.elastic.placement import Placement
        from flexfloor.engine.devices.ascend import AscendDevice
        from flexfloor.engine.world import ElasticWorld

        self.rank, self.serial = rank, 0
        self.worker = build(rank)
        self.runner = self.worker.model_runner
        mutant()
        self.world = ElasticWorld(self.worker, AscendDevice(), settings())
        self.base = Placement.linear(EXPERTS, RANKS, EXPERTS)
        self.placement, self.members, self.asleep = self.base, tuple(range(RANKS)), set()
        self.load = 3

    def step(self):
        """One decode step of two requests on every member, and every expert must be found where the tables say."""
        if self.rank not in self.members:
            return
        self.runner.members = self.members
        before, replays = self.tables(), self.replays()
        self.runner._dummy_run(2)
        if self.replays() != replays + 1:
            journal.breaks("eager-or-captured", "a decode step was not replayed from a graph")
        if before != self.tables():
            journal.breaks("block-tables", "the blocks of requests are gone")
        self.experts_found()

    def replays(self):
        return sum(entry[0] == "replay" for entry in journal.entries)

    def tables(self):
        buffer = self.runner.input_batch.block_table.block_tables[0].block_table
        return [buffer.gpu.tolist(), buffer.cpu.tolist()]

    def experts_found(self):
        from vllm.distributed import get_dp_group

        for layer in self.runner.get_model().layers:
            experts = layer.routed_experts
            mine = experts.w13_weight.data[:, 0, 0].clone()
            shown = [torch.empty_like(mine) for _ in self.members]
            if len(self.members) > 1:
                dist.all_gather(shown, mine, group=get_dp_group().cpu_group)
            else:
                shown = [mine]
            physical = torch.cat(shown)
            if physical[experts.log2phy.long()].tolist() != list(range(EXPERTS)):
                journal.breaks("every-expert-found", f"physical rows hold {physical.tolist()}")
            place, rows = self.members.index(self.rank), EXPERTS // len(self.members)
            wanted = [p - place * rows if place * rows <= p < (place + 1) * rows else -1 for p in range(EXPERTS)]
            if experts.ascend_expert_map.tolist() != wanted:
                journal.breaks("map-by-physical-id", f"{experts.ascend_expert_map.tolist()}")

    def ticket(self, after, moves, maps, woken=(), before=None):
        from flexfloor.elastic.ticket import Ticket

        self.serial += 1
        before = self.members if before is None else before
        return Ticket(self.serial, before, tuple(after), tuple(moves), maps, tuple(woken), (), DEADLINE_S, self.load)

    def smaller(self, load):
        """One more graph of the present world, for a load that has fallen."""
        ticket = dataclasses.replace(self.ticket(self.members, [], {}), load=load, lean=True)
        journal.enter("smaller", ticket.serial)
        if self.rank in self.members:
            if self.world.capture_wanted(load) != load:
                journal.breaks("eager-or-captured", f"no graph of {load} is asked for")
            self.world.capture(ticket)
        self.step()
        dist.all_reduce(torch.zeros(1))

    def shrink(self, after, *, undo=False, lean=False):
        from flexfloor.elastic import placement as rows_of

        target, moves = rows_of.shrink(self.placement, list(after))
        maps = {rank: target.expert_map(rank) for rank in after}
        ticket = dataclasses.replace(self.ticket(after, moves, maps), lean=lean)
        journal.enter("stage", ticket.serial)
        self.world.prepare(ticket)
        self.world.stage(ticket)
        dist.all_reduce(torch.zeros(1))
        journal.enter("switch", ticket.serial)
        self.world.switch(ticket)
        self.runner.members = tuple(after)
        journal.enter("capture", ticket.serial)
        self.world.capture(ticket)
        self.world.trial(ticket)
        if undo:
            self.world.undo(ticket)
            return
        self.world.confirm(ticket)
        left = [rank for rank in self.members if rank not in after]
        self.placement, self.members = target, tuple(after)
        self.step()
        dist.all_reduce(torch.zeros(1))
        if self.rank in left:
            self.park()
        self.asleep |= set(left)
        dist.all_reduce(torch.zeros(1))
        self.step()

    def park(self):
        self.world.park()
        while (report := self.world.park_report()) is None:
            time.sleep(0.01)
        if "error" in report or report["released_bytes"] <= 0:
            journal.breaks("released", str(report))

    def restore(self, kind):
        from flexfloor.elastic import placement as rows_of

        parked = [rank for rank in range(RANKS) if rank not in self.members]
        woken = parked if kind == "full" else []
        held = self.placement.clone()
        held.forget(parked)
        target, moves = rows_of.restore(held, self.base, [*self.members, *woken])
        ticket = self.ticket(range(RANKS), moves, {}, woken)
        journal.enter("restore", ticket.serial)
        self.world.wake(ticket)
        self.world.refill(ticket)
        self.world.switch_back(ticket)
        self.world.confirm(ticket)
        self.placement, self.members = target, tuple(range(RANKS))
        if kind == "full":
            self.asleep = set()
            self.step()

    def wake_all(self):
        from flexfloor.elastic import placement as rows_of

        sleepers = sorted(self.asleep)
        target, moves = rows_of.refill(self.placement, self.base, sleepers)
        donors = [rank for rank in range(RANKS) if rank not in self.asleep]
        ticket = self.ticket(donors, moves, {}, sleepers, tuple(donors))
        journal.enter("wake_all", ticket.serial)
        self.world.wake(ticket)
        self.world.refill(ticket)
        self.placement, self.asleep = target, set()
        self.step()

    def play(self):
        self.step()
        self.shrink((1, 3))
        self.shrink((3,))
        self.restore("full")
        self.shrink((0, 2), undo=True)
        self.step()
        self.shrink((0, 1), lean=True)
        self.smaller(2)
        self.restore("topology")
        self.wake_all()
        self.shrink((1, 3))
        self.restore("full")


def one(rank, folder, name, out):
    import mutants

    journal.clear()
    error = None
    try:
        os.environ.pop("MASTER_ADDR", None)
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=30))
        Run(rank, mutants.ALL[name]).play()
    except BaseException as raised:  # noqa: BLE001
        error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        if os.environ.get("BED_TRACE"):
            traceback.print_exc()
    out.write_text(json.dumps({"broken": journal.broken, "error": error, "journal": journal.entries}))
    os._exit(0)


def run(name):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                one(rank, folder, name, folder / f"{rank}.json")
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


MODULES = (
    "vllm.distributed.device_communicators.shm_broadcast",
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.models.utils",
    "vllm.v1.worker.workspace",
)
OVER_THE_STANDIN = (
    "vllm_ascend.device_allocator.sleep_mem_optimized",
    "vllm_ascend.ops.fused_moe.moe_comm_method",
    "vllm_ascend.patch.worker.patch_distributed",
    "vllm_ascend.worker.model_runner_v1",
    "vllm_ascend.worker.worker",
    "flexfloor.engine.devices.ascend",
    "flexfloor.engine.world",
    "mutants",
)


def prepare(package):
    """Import everything once; the ranks are forked, and a garbage collection in them leaves it alone."""
    torch.set_num_threads(1)
    os.environ.update(TASK_QUEUE_ENABLE="1", VLLM_USE_V2_MODEL_RUNNER="0")
    for name in MODULES:
        importlib.import_module(name)
    torch_npu.install()
    real.install(package)
    for name in OVER_THE_STANDIN:
        importlib.import_module(name)
    patch_as_the_plugin_does()
    keep_journal()
    gc.collect()
    gc.freeze()


def settings():
    """Room for floor 1; spare rows are NaN."""
    from flexfloor.engine.settings import EngineSettings

    return EngineSettings(
        world_size=RANKS, smallest_floor=1, events_dir=".", board="b", deadline_s=DEADLINE_S, poison=True
    )


def patch_as_the_plugin_does():
    """Without the check of installed packages, which are not installed here."""
    from flexfloor.engine import rows
    from flexfloor.engine.devices import ascend_experts

    ascend_experts.patch()
    rows.patch(settings())


def keep_journal():
    """Note two of vllm-ascend's own calls."""
    from vllm_ascend.device_allocator.sleep_mem_optimized import AclGraphSleepWakeupManager as Graphs
    from vllm_ascend.ops.fused_moe import moe_comm_method

    reset, setup = Graphs.reset_all_graph_params, moe_comm_method.setup_moe_comm_method

    def noted_reset():
        journal.note("reset")
        reset()

    def noted_setup(moe_config):
        journal.note("setup", moe_config.ep_size)
        setup(moe_config)

    Graphs.reset_all_graph_params, moe_comm_method.setup_moe_comm_method = noted_reset, noted_setup
    destroy = dist.destroy_process_group

    def noted_destroy(group=None):
        ranks = dist.get_process_group_ranks(group)
        journal.note("destroy", ranks)
        if len(ranks) == RANKS:
            journal.breaks("the-full-world-stays", "a group of all ranks is destroyed")
        destroy(group)

    dist.destroy_process_group = noted_destroy


if __name__ == "__main__":
    prepare(sys.argv[1])
    import mutants

    for mutant in sys.argv[2:] or mutants.ALL:
        began = time.monotonic()
        ranks = run(mutant)
        print(json.dumps({"mutant": mutant, "ranks": ranks, "seconds": time.monotonic() - began}), flush=True)
