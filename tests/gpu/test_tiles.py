"""An expert's output for a token does not depend on the batch, though vLLM picks other tiles for another batch."""

import pytest

DEVICES = 1
BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512)


@pytest.mark.parametrize("away", [0, 2], ids=["all local", "half local"])
@pytest.mark.parametrize(
    ("rows", "hidden", "inner", "topk"), [(64, 2048, 768, 8), (128, 2048, 768, 8), (32, 1024, 512, 8), (16, 128, 64, 4)]
)
def test_rows_of_the_experts_are_the_same_in_every_batch(rows, hidden, inner, topk, away):
    import torch
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

    generator = torch.Generator("cuda").manual_seed(rows)

    def drawn(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    tokens = drawn(max(BATCHES), hidden).bfloat16()
    up, down = (drawn(rows, 2 * inner, hidden) * 0.02).bfloat16(), (drawn(rows, hidden, inner) * 0.02).bfloat16()
    everywhere = rows * (away or 1)
    chosen = drawn(max(BATCHES), everywhere).topk(topk).indices.int()
    weights = drawn(max(BATCHES), topk).sigmoid()
    local = None
    if away:
        local = torch.full((everywhere,), -1, dtype=torch.int32, device="cuda")
        local[::away] = torch.arange(rows, dtype=torch.int32, device="cuda")
    tiles, found = set(), {}
    for batch in BATCHES:
        config = try_get_optimal_moe_config(tuple(up.shape), tuple(down.shape), topk, None, batch)
        tiles.add(tuple(sorted(config.items())))
        found[batch] = fused_experts(
            tokens[:batch],
            up,
            down,
            weights[:batch],
            chosen[:batch],
            global_num_experts=everywhere,
            expert_map=local,
        )
    assert len(tiles) > 1, "one tiling serves all batches: the case shows nothing"
    for batch in BATCHES[:-1]:
        assert torch.equal(found[batch], found[BATCHES[-1]][:batch]), f"rows in a batch of {batch} differ"
