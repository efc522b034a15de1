"""Expert rows and KV get and lose memory between steps, on live in-process engines (poisoned: new rows are NaN)."""

from types import SimpleNamespace

import pytest
from bed_runs import events, requests, roll

from flexfloor.engine.budget import Budget
from flexfloor.errors import ProtocolError

FULL = (0, 1, 2, 3)
FEW = 576
"""KV tokens: a request of full length, and little more."""


@pytest.fixture(scope="module")
def greedy(bed):
    made = requests([[12, 4], [2, 3], [6, 8], [4, 2]])
    return made, roll(bed, made, (4,))


def moved(bed):
    return [event["moved_rows"] for event in events(bed, "stage_commit") if event["rank"] == 0][-2:]


def test_a_step_has_the_rows_of_its_floor_and_the_kv_of_its_plan(bed, greedy):
    made, full = greedy
    for ladder, rows in (((4,), 4), ((4, 2), 8), ((4, 2, 1), 16)):
        assert roll(bed, made, ladder, kv_tokens=FEW).same_as(full)
        assert bed.call("usage")[0]["rows"] == rows
        assert bed.call("usage")[0]["kv_tokens"] == FEW


def test_more_kv_than_there_is_becomes_all_there_is(bed, greedy):
    made, full = greedy
    roll(bed, made, (4,))
    most = bed.call("usage")[0]["kv_tokens"]
    assert roll(bed, made, (4,), kv_tokens=100 * most).same_as(full)
    assert bed.call("usage")[0]["kv_tokens"] == most > FEW


def test_less_kv_than_one_request_needs_becomes_what_it_needs(bed, greedy):
    made, full = greedy
    assert roll(bed, made, (4,), kv_tokens=1).same_as(full)
    assert bed.call("usage")[0]["kv_tokens"] == 512, "max_model_len of the bed"


def test_kv_of_the_plan_is_a_limit_and_tokens_stay(bed):
    made = requests([[60] * 7, [4], [4], [4]])
    wide = roll(bed, made, (4,))
    narrow = roll(bed, made, (4, 2), kv_tokens=FEW)
    assert sum(narrow.preemptions.values()) > sum(wide.preemptions.values())
    assert narrow.tokens == wide.tokens


def test_copies_in_rows_that_lost_their_memory_are_moved_again(bed, greedy):
    made, full = greedy
    roll(bed, made, (4, 2, 1))
    assert roll(bed, made, (4, 2, 1)).same_as(full)
    assert moved(bed) == [4, 0], "rank 0 kept its copies"
    roll(bed, made, (4,))
    assert roll(bed, made, (4, 2, 1)).same_as(full)
    assert moved(bed) == [8, 8]


def test_twenty_sizes_leave_tokens_and_memory_as_they_were(bed, greedy):
    made, full = greedy
    seen = []
    for cycle in range(20):
        ladder, tokens = (((4,), FEW), ((4, 2), None), ((4, 2, 1), 2 * FEW), ((4, 2), FEW))[cycle % 4]
        assert roll(bed, made, ladder, kv_tokens=tokens).same_as(full)
        seen.append([usage["uss"] for usage in bed.call("usage")])
    for rank in range(4):
        assert max(row[rank] for row in seen[16:]) - min(row[rank] for row in seen[4:8]) < 8 << 20


def test_memory_of_what_a_step_does_not_need_goes_back(bed, greedy):
    made, _ = greedy
    roll(bed, made, (4, 2, 1))
    held = bed.call("usage")
    roll(bed, made, (4,), kv_tokens=FEW)
    for before, after in zip(held, bed.call("usage"), strict=True):
        assert before["backed_bytes"] - after["backed_bytes"] >= 12 * before["row_bytes"]
        assert before["uss"] - after["uss"] > 0.8 * (before["backed_bytes"] - after["backed_bytes"]) - (1 << 20)


def budget_over(scheduler, worker):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32, num_gpu_blocks=64), model_config=SimpleNamespace(max_model_len=512)
    )
    engine = SimpleNamespace(vllm_config=config, scheduler=scheduler)
    budget = Budget(engine, worker, {"experts": 16, "capacity": 16, "kv_blocks": {}})
    budget._at_most = {4: 64, 2: 60, 1: 50}
    return budget


def test_batches_of_aborted_requests_are_taken_in_first():
    calls = []
    scheduler = SimpleNamespace(
        get_num_unfinished_requests=lambda: 0, reset_prefix_cache=lambda: calls.append("blocks counted")
    )
    worker = SimpleNamespace(drain=lambda: calls.append("taken in"))
    with pytest.raises(ProtocolError, match="blocks are in use"):
        budget_over(scheduler, worker).make(2, None)
    assert calls == ["taken in", "blocks counted"]


def test_nothing_changes_while_requests_run():
    budget = budget_over(SimpleNamespace(get_num_unfinished_requests=lambda: 1), None)
    with pytest.raises(ProtocolError, match="while requests run"):
        budget.make(2, None)
    assert budget.tokens() == 63 * 32
