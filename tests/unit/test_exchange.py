"""Operator limits on Ascend decide which EP sizes are planned, and what the planner is told (issue 6, line 2)."""

import pytest

from flexfloor import exchange
from flexfloor.config import load_config
from flexfloor.errors import InputError
from flexfloor.exchange import Exchange
from flexfloor.planner.rate import RateModel
from flexfloor.planner.step import StepPlanner

BASE = """
flexfloor:
  world_size: 32
  responses_per_prompt: 2
  step_prompts: 32
  num_experts: {experts}
  hardware: {hardware}
  floors: {{natural: {floors}}}
  kv: {{capacity: {{natural: {{8: 999, 16: 999, 32: 999}}}}}}
{more}
"""


def written(tmp_path, hardware="ascend-a2", floors="[8, 16]", experts=128, more=""):
    file = tmp_path / "config.yaml"
    file.write_text(BASE.format(hardware=hardware, floors=floors, experts=experts, more=more))
    return file


@pytest.mark.parametrize(
    ("hardware", "ep", "experts", "tokens", "wanted"),
    [
        ("ascend-a2", 16, 128, 64, Exchange.MC2),
        ("ascend-a2", 8, 128, 64, Exchange.ALLGATHER),
        ("ascend-a2", 1, 128, 64, Exchange.ALLGATHER),
        ("ascend-a2", 16, 384, 64, Exchange.MC2),  # 24 experts a device
        ("ascend-a2", 16, 400, 64, Exchange.ALLGATHER),  # 25
        ("ascend-a2", 16, 128, 513, Exchange.ALLGATHER),
        ("ascend-a3", 8, 128, 64, Exchange.MC2),
        ("ascend-a3", 2, 128, 64, Exchange.MC2),
        ("ascend-a3", 1, 128, 64, Exchange.ALLGATHER),
        ("ascend-a3", 16, 128, 513, Exchange.ALLTOALL),
    ],
)
def test_what_is_picked(hardware, ep, experts, tokens, wanted):
    assert exchange.picked(hardware, ep, experts, tokens) is wanted


def test_capture_sizes_are_the_capacity():
    assert exchange.picked("ascend-a3", 16, 128, 65, capacity=64) is Exchange.ALLTOALL


def test_sizes_that_run():
    assert exchange.admissible("ascend-a2", 16, 128) == (16, 8, 4, 2, 1)
    assert exchange.admissible("ascend-a2", 32, 96) == (32, 16, 12, 8, 6, 4, 3, 2, 1)
    # 24 divides 96, vllm-ascend picks MC2 there (4 experts a device), and the operator does not take 24 ranks.
    assert "MC2 at EP 24" in exchange.refused("ascend-a2", 24, 96)
    assert exchange.refused("ascend-a3", 24, 96) is None
    assert "does not divide" in exchange.refused("ascend-a3", 5, 128)


def test_a_batch_that_the_operator_does_not_take():
    assert "256 tokens" in exchange.refused("ascend-a2", 16, 128, 257)
    assert exchange.refused("ascend-a2", 8, 128, 257) is None
    assert exchange.refused("ascend-a3", 16, 128, 512) is None


def test_buffer_of_mc2():
    # Qwen3-30B-A3B, batches of 64: 2 x (128 x 64 x 4608 + 8 x 64 x 4096) bytes, below HCCL's own 200 MB
    assert exchange.mc2_buffer_bytes(2048, 128, 8, 64) == 79_691_776


def test_config_refuses_a_size_with_the_reason(tmp_path):
    with pytest.raises(InputError, match=r"floors.natural: vllm-ascend picks MC2 at EP 24"):
        load_config(written(tmp_path, floors="[24]", experts=96))
    load_config(written(tmp_path, hardware="ascend-a3", floors="[24]", experts=96))


def test_the_planner_is_told(tmp_path):
    planner = StepPlanner(load_config(written(tmp_path)), None)
    assert planner._exchanges == (
        "EP 8: tokens are exchanged by all-gather, at EP 32 by MC2; the speed may differ, use measured step times",
    )
    assert StepPlanner(load_config(written(tmp_path, hardware="ascend-a3")), None)._exchanges == ()


def test_no_step_time_is_guessed_across_exchanges(tmp_path):
    table = tmp_path / "times.csv"
    table.write_text("ep,batch_per_rank,decode_ms\n16,1,10\n16,64,20\n32,1,8\n32,64,16\n")
    more = f"  rate: {{table: {table}, extrapolate: true}}"
    with pytest.raises(InputError, match="EP 8, which exchanges tokens in another way than EP 16"):
        RateModel(load_config(written(tmp_path, more=more)))
    RateModel(load_config(written(tmp_path, hardware="ascend-a3", more=more)))
