"""The sums of the slots are exact: no grouping into ranks changes them."""

import pytest

DEVICES = 1


@pytest.mark.parametrize(("rows", "width", "topk"), [(1, 2048, 8), (5, 128, 4), (64, 1000, 8), (300, 4096, 2)])
def test_every_grouping_of_slots_into_ranks_gives_the_same_sum(rows, width, topk):
    import torch

    from flexfloor.engine.devices.cuda_combine import sum_slots

    generator = torch.Generator("cuda").manual_seed(rows)
    slots = torch.randn(rows, topk, width, device="cuda", generator=generator)
    slots = (slots * torch.logspace(-9, 3, width, device="cuda")).bfloat16()

    def summed(mine):
        sums = torch.empty(rows, width, device="cuda", dtype=torch.float64)
        sum_slots(sums, torch.where(mine[:, None], slots, 0))
        return sums

    every = torch.ones(topk, dtype=torch.bool, device="cuda")
    whole = summed(every)
    rounded = slots.double().mul(2.0**36).round().mul(2.0**-36)
    assert torch.equal(whole, rounded.sum(1)), "sums on a grid are exact, in whatever order torch adds"
    plain = slots.float().sum(1).bfloat16()
    grouped_plain = 0
    for ranks in (2, 3):
        owner = torch.randint(ranks, (topk,), device="cuda", generator=generator)
        parts = [summed(owner == rank) for rank in range(ranks)]
        assert torch.equal(sum(parts), whole)
        assert torch.equal(sum(parts[::-1]), whole)
        stock = sum(slots[:, owner == rank].float().sum(1).bfloat16() for rank in range(ranks))
        grouped_plain += int((stock != plain).sum())
    assert topk == 2 or grouped_plain, "stock partial sums are equal too: the case shows nothing"


def test_a_row_that_was_never_filled_shows():
    import torch

    from flexfloor.engine.devices.cuda_combine import sum_slots

    slots = torch.ones(2, 4, 64, device="cuda", dtype=torch.bfloat16)
    slots[1, 2, 5] = float("nan")
    sums = torch.empty(2, 64, device="cuda", dtype=torch.float64)
    sum_slots(sums, slots)
    assert sums.isnan().nonzero().tolist() == [[1, 5]]
    assert sums[0].eq(4).all()
