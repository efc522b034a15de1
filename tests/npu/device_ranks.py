"""What one assumption of the Ascend module looks like on devices, without vLLM: one process a rank.

``python device_ranks.py CASE`` prints what docs/ascend.md says. Never run by CI; nothing here has run on an NPU yet.
"""

import sys
import time
import types
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

RANKS = 4
LIMIT_S = 60.0


def _begin(rank, folder):
    import torch_npu  # noqa: F401

    torch.npu.set_device(rank)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("hccl", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=LIMIT_S))
    return dist.distributed_c10d._get_default_store()


def _full_sum(rank):
    ones = torch.full((1,), float(rank), device="npu")
    dist.all_reduce(ones)
    return float(ones)


def group_of_some_ranks(rank, folder):
    """Ranks 0 and 1 make a group while 2 and 3 do something else."""
    from flexfloor.engine.devices import ascend_groups, host

    store = _begin(rank, folder)
    print(f"full world: {_full_sum(rank)}")
    if rank > 1:
        time.sleep(5)
        print(f"rank {rank} took no part")
        return
    began = time.monotonic()
    cpu = host.gloo_group("some", (0, 1), store, LIMIT_S)
    device = ascend_groups.hccl_group("ep", "some", (0, 1), store, LIMIT_S)
    ascend_groups.open_communicator(device, cpu)
    name = device._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank(group=device))
    print(f"communicator {name} on rank {rank} after {time.monotonic() - began:.2f} s")
    mine = torch.full((1,), float(rank), device="npu")
    dist.all_reduce(mine, group=device)
    print(f"all_reduce over (0, 1): {float(mine)}")


def destroy_one_group(rank, folder):
    """A group of ranks 0 and 1 goes; the full world still works."""
    from flexfloor.engine.coordinators import Group
    from flexfloor.engine.devices import ascend_groups, host

    store = _begin(rank, folder)
    _full_sum(rank)
    if rank < 2:
        cpu = host.gloo_group("gone", (0, 1), store, LIMIT_S)
        device = ascend_groups.hccl_group("ep", "gone", (0, 1), store, LIMIT_S)
        ascend_groups.open_communicator(device, cpu)
        ascend_groups.destroy(Group((0, 1), cpu, device))
    print(f"full world after destroy: {_full_sum(rank)}")


def rows_travel(rank, folder):
    """Rows go from rank 0 to rank 2 on a communicator of their own, beside one of MC2's name."""
    from flexfloor.engine.devices import ascend_groups
    from flexfloor.engine.devices.ascend import AscendDevice

    store = _begin(rank, folder)
    ascend_groups.hccl_group("mc2", "beside", range(RANKS), store, LIMIT_S)
    channel = ascend_groups.channel("rows", range(RANKS), store, LIMIT_S)
    device = AscendDevice()
    device._at, device._stream = torch.device("npu", rank), torch.npu.Stream()
    rows = torch.arange(3 * 64 * 64, device=device._at, dtype=torch.float32).reshape(3, 64, 64)
    there = torch.zeros_like(rows)
    sends = {2: [rows]} if rank == 0 else {}
    receives = {0: [there]} if rank == 2 else {}
    device.transfer(sends, receives, channel, LIMIT_S)
    if rank == 2:
        print(f"rows equal: {bool(torch.equal(rows, there))}")


def narrowed_weights(rank, folder):
    """Grouped matmul over the first rows of a larger tensor, and over a tensor of just these rows."""
    import torch_npu

    if rank:
        return
    torch.npu.set_device(0)
    whole = torch.randn(8, 256, 512, device="npu", dtype=torch.bfloat16)
    tokens = torch.randn(64, 256, device="npu", dtype=torch.bfloat16)
    counts = torch.full((4,), 16, device="npu", dtype=torch.int64)

    def product(weight):
        (out,) = torch_npu.npu_grouped_matmul(
            x=[tokens], weight=[weight], split_item=2, group_list_type=1, group_type=0, group_list=counts
        )
        return out.float()

    difference = (product(whole[:4]) - product(whole[:4].clone())).abs().max()
    print(f"difference to a tensor of E/W rows: {float(difference)}")


CASES = {case.__name__: case for case in (group_of_some_ranks, destroy_one_group, rows_travel, narrowed_weights)}


def main(name):
    folder = Path(mkdtemp())
    multiprocessing.spawn(_one, args=(name, folder), nprocs=RANKS)


def _one(rank, name, folder):
    from vllm.config import set_current_vllm_config

    config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(data_parallel_size=RANKS))
    with set_current_vllm_config(config):
        CASES[name](rank, folder)
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
