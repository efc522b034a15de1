"""One process of a gloo group, for tests of what is joint."""

import torch.distributed as dist

from flexfloor.engine.coordinators import Group
from flexfloor.engine.devices import host


def most(rank, file, values, answers):
    """Puts (rank, what `host.most` answers over two processes) into ``answers``."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    answers.put((rank, host.most(values, Group((0, 1), dist.group.WORLD, dist.group.WORLD))))
    dist.destroy_process_group()
