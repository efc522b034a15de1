"""The kernel that adds the slots gives what the plain sum gives."""

import pytest


@pytest.mark.parametrize(("rows", "width", "topk"), [(1, 2048, 8), (5, 128, 4), (64, 1000, 8), (300, 4096, 2)])
def test_slots_are_added_in_float32_in_their_order(rows, width, topk):
    import torch

    from flexfloor.engine.combine import sum_slots as plain
    from flexfloor.engine.devices.cuda_combine import sum_slots

    generator = torch.Generator("cuda").manual_seed(rows)
    slots = torch.randn(rows, topk * width, device="cuda", generator=generator).bfloat16()
    ours, theirs = torch.empty(2, rows, width, device="cuda", dtype=torch.bfloat16)
    sum_slots(ours, slots)
    plain(theirs, slots)
    assert torch.equal(ours, theirs)
    rounded = slots.view(rows, topk, width).unbind(1)
    total = rounded[0]
    for part in rounded[1:]:
        total = total + part
    assert topk == 2 or not torch.equal(ours, total), "a sum in bfloat16 gives the same: the case shows nothing"
