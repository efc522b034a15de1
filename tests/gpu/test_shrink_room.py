"""After test_shrink: rows and KV change places between steps, planned residency, new weights; AsyncLLM, CUDA graphs.

Rows that get memory are NaN until something is moved into them, and captured graphs stay in use throughout.
"""

import pytest
from records import checked, eager, whole

MIB = 1 << 20


def test_a_smaller_floor_takes_its_rows_from_kv(bench, load, static):
    bench.arm("flex room", load, (2, 1))
    record = bench.records[-1]
    for status in bench.statuses:
        full, small = (one["room"][status["rank"]] for one in (static, record))
        by_floor = {int(floor): tokens for floor, tokens in status["kv_tokens_by_floor"].items()}
        assert full == [16, by_floor[2]]
        assert small == [32, by_floor[1]]
        rows, token = 16 * status["facts"]["row_bytes"], status["facts"]["kv_bytes"] / by_floor[2]
        assert (full[1] - small[1]) * token == pytest.approx(rows, rel=0.15, abs=64 * MIB)
    assert whole(checked(record))
    assert eager(record) == 0


def test_twenty_sizes_leave_tokens_graphs_and_memory_as_they_were(bench, load, static):
    before, captured = [], 0
    for cycle in range(20):
        ladder, tokens = (((2,), 8192), ((2, 1), None), ((2, 1), 16384), ((2,), None))[cycle % 4]
        bench.arm(f"size {cycle}", load, ladder, kv_tokens=tokens)
        record = bench.records[-1]
        assert whole(checked(record))
        assert eager(record) == 0
        captured += sum(len(t["captured"]) for t in record["transitions"])
        if cycle % 4 == 1:
            before.append(record["released"][0]["before"])
    assert captured == 0, "addresses stay, so graphs of an earlier step serve"
    assert max(before) - min(before) <= 64 * MIB


def test_planned_residency_moves_and_captures_before_the_first_token(bench, load, static):
    bench.arm("static, rows gone", load, (2,))
    bench.arm("planned", load, (2, 1), predicted=((0,),))
    record = bench.records[-1]
    assert record["rehearsals"][0]["moved_rows"] == 16
    (transition,) = record["transitions"]
    assert (transition["moved_rows"], transition["captured"]) == (0, [])
    assert whole(checked(record))
    assert eager(record) == 0


def test_new_weights_of_the_same_values_change_nothing(bench, load, static):
    bench.sleep_and_reload()
    bench.arm("static, reloaded", load, (2,))
    assert whole(checked(bench.records[-1]))
    bench.sleep_and_reload()
    bench.arm("flex, reloaded", load, (2, 1))
    record = bench.records[-1]
    assert record["transitions"][0]["moved_rows"] == 16, "copies of the old weights must not be used"
    assert whole(checked(record))
    assert eager(record) == 0
