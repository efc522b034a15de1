"""Fifty shrink/restore cycles in one set of processes: nothing grows."""

from bed_runs import requests, roll

CYCLES = 50
SHAPES = [[[18], [4], [9], [5]], [[4], [18], [5], [9]], [[5], [9], [4], [18]], [[9], [5], [18], [4]]]


def test_memory_descriptors_threads_and_segments_stay_flat(bed):
    made = [requests(shape) for shape in SHAPES]
    full = [roll(bed, rollout, (4,)) for rollout in made]
    for _ in range(2):
        for rollout in made:
            roll(bed, rollout, (4, 2, 1))
    before = bed.call("usage")
    for cycle in range(CYCLES):
        kind = cycle % len(made)
        seen = roll(bed, made[kind], (4, 2, 1))
        assert len(seen.worlds) == 4, "a cycle did not shrink twice"
        assert seen.same_as(full[kind])
    after = bed.call("usage")
    for rank, (was, now) in enumerate(zip(before, after, strict=True)):
        assert now["fds"] <= was["fds"] + 4, f"rank {rank}: file descriptors {was['fds']} -> {now['fds']}"
        assert now["threads"] <= was["threads"] + 2, f"rank {rank}: threads {was['threads']} -> {now['threads']}"
        assert now["shm"] <= was["shm"], f"rank {rank}: shared memory {was['shm']} -> {now['shm']}"
        grown = now["uss"] - was["uss"]
        assert grown < 16 << 20, f"rank {rank}: {grown >> 20} MiB more after {CYCLES} cycles"
