"""EP 2 -> 1 -> 2 on two devices through AsyncLLM: tokens, log-probabilities, graphs, memory."""

from records import checked, whole


def last(bench):
    record = checked(bench.records[-1])
    assert record["distinct_responses"] == 32, "responses are equal: the comparison shows nothing"
    return record


def test_the_first_shrink_captures_all_graphs_that_the_full_world_would_use(bench, load, static):
    bench.arm("flex", load, (2, 1))
    record = last(bench)
    (transition,) = record["transitions"]
    assert transition["survivors"] == [0]
    assert transition["captured"] == [1, 2, 4, 8, 16, 32], "24 requests fit the bucket of 32, later ones smaller ones"
    assert transition["kept"] == []
    assert whole(record)


def test_kept_graphs_and_copies_make_the_second_shrink_a_swap(bench, load, static):
    bench.arm("flex again", load, (2, 1))
    record = last(bench)
    (transition,) = record["transitions"]
    assert transition["captured"] == []
    assert transition["moved_bytes"] == 0
    assert whole(record)


def test_the_full_world_after_a_restore_is_the_one_before(bench, load, static):
    bench.arm("static again", load, (2,))
    assert whole(last(bench))


def test_no_decode_step_is_eager_in_any_world(bench, load, static):
    bench.arm("flex audited", load, (2, 1))
    audit = last(bench)["audit"]
    assert audit == {
        "0": {"full": 89, "eager": 0, "prefill": 1},
        "1": {"full": 19, "eager": 0, "prefill": 1},
    }


def test_the_leaver_gives_back_nearly_all_and_takes_it_again(bench, load, static):
    bench.arm("flex memory", load, (2, 1))
    (slept,) = last(bench)["released"]
    facts = bench.statuses[1]["facts"]
    assert slept["rank"] == 1
    assert slept["bytes"] >= facts["weight_bytes"] + facts["kv_bytes"]
    assert slept["before"] - slept["after"] == slept["bytes"]


def test_topology_restore_leaves_the_leaver_asleep_until_it_is_woken(bench, load, static):
    bench.arm("flex topology", load, (2, 1), end="topology")
    assert whole(last(bench))
    bench.wake_all()
    bench.arm("static woken", load, (2,))
    assert whole(last(bench))


def test_the_other_rank_survives_as_well(bench, gpu, load):
    other = gpu.Load(load.lengths[::-1], prompt=40)
    bench.arm("static other", other, (2,))
    bench.arm("flex other", other, (2, 1))
    record = last(bench)
    assert record["transitions"][0]["survivors"] == [1]
    assert whole(record)
