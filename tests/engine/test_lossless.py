"""Tokens and log-probabilities with shrinking are bit-identical to those without (in-process engines).

Released and spare expert rows, released weights and KV are NaN in this bed, so a stale read cannot pass.
"""

import pytest
from bed_runs import events, requests, roll

FULL = (0, 1, 2, 3)
LENGTHS = [[16, 40, 70], [10, 24, 20], [30, 60, 50], [32, 8, 28]]


@pytest.fixture(scope="module")
def greedy(bed):
    made = requests(LENGTHS)
    return made, roll(bed, made, (4,))


def test_the_bed_measures_something(greedy):
    _, seen = greedy
    assert seen.worlds == [FULL]
    assert all(value == value for row in seen.logprobs.values() for value in row), "NaN reached a token"
    assert len({tuple(row) for row in seen.tokens.values()}) == len(seen.tokens), "all responses are equal"


def test_two_stages(bed, greedy):
    made, full = greedy
    seen = roll(bed, made, (4, 2))
    assert seen.worlds == [FULL, (0, 2), FULL]
    assert seen.same_as(full)


def test_three_stages(bed):
    made = requests([[70, 40], [10, 24], [30, 50], [32, 8]])
    full, seen = roll(bed, made, (4,)), roll(bed, made, (4, 2, 1))
    assert seen.worlds == [FULL, (0, 2), (0,), FULL]
    assert seen.same_as(full)


def test_stages_skipped_when_both_quorums_are_met_at_once(bed):
    made = requests([[12], [12], [12], [40]])
    full, seen = roll(bed, made, (4,)), roll(bed, made, (4, 2, 1))
    assert seen.worlds == [FULL, (3,), FULL]
    assert seen.same_as(full)


def test_non_contiguous_survivors_are_those_with_unfinished_requests(bed):
    made = requests([[8], [50, 12], [9, 10], [60]])
    full, seen = roll(bed, made, (4,)), roll(bed, made, (4, 2))
    assert seen.worlds == [FULL, (1, 3), FULL]
    assert seen.same_as(full)


def test_survivors_are_filled_up_with_complete_ranks(bed):
    made = requests([[8], [8], [60], [8]])
    full, seen = roll(bed, made, (4,)), roll(bed, made, (4, 2))
    assert len(seen.worlds[1]) == 2
    assert 2 in seen.worlds[1]
    assert seen.same_as(full)


def test_shrink_during_chunked_prefill(bed):
    made = requests([[3, 3], [4], [20, 9], [5]], prompts={"r2-0": 450, "r2-1": 60})
    full, seen = roll(bed, made, (4,)), roll(bed, made, (4, 2, 1))
    rank = seen.ranks[2]
    first_small = next(i for i, world in enumerate(rank.worlds) if len(world) < 4)
    assert first_small in rank.prefilling, "the world did not change while a prompt was being prefilled"
    assert first_small + 1 in rank.prefilling
    assert seen.same_as(full)


def test_seeded_sampling_in_chunked_prefill_does_not_depend_on_the_chunks(bed):
    alone = requests([[6], [6], [6], [6]], prompts={"r2-0": 40}, temperature=1.0)
    crowded = requests([[6], [6], [6, 6, 6], [6]], prompts={"r2-0": 40, "r2-1": 200, "r2-2": 200}, temperature=1.0)
    one, many = roll(bed, alone, (4,)), roll(bed, crowded, (4,))
    assert many.ranks[2].prefilling
    assert many.tokens["r2-0"] == one.tokens["r2-0"]


def test_restore_in_mid_rollout_then_shrink_again(bed, greedy):
    made, full = greedy
    seen = roll(bed, made, (4, 2, 1), restore_at=(45,))
    assert seen.worlds[:4] == [FULL, (0, 2), FULL, (0, 2)]
    assert seen.same_as(full)


def test_sampling_at_temperature_one(bed):
    made = requests(LENGTHS, temperature=1.0)
    full, seen = roll(bed, made, (4,)), roll(bed, made, (4, 2, 1))
    assert len(seen.worlds) >= 3
    assert seen.same_as(full)
    again = roll(bed, made, (4, 2))
    assert again.same_as(full)


def test_second_and_third_rollout_after_restore(bed, greedy):
    made, full = greedy
    other = requests([[9, 30], [60, 11], [12, 13], [25, 45]], temperature=1.0)
    full_other = roll(bed, other, (4,))
    for rollout, reference in ((made, full), (other, full_other), (made, full)):
        seen = roll(bed, rollout, (4, 2, 1))
        assert len(seen.worlds) > 2
        assert seen.same_as(reference)


def test_requests_preempted_for_kv(bed):
    made = requests([[6, 6], [7], [300] * 9, [8]], prompts={f"r2-{i}": 20 + i for i in range(9)})
    full, seen = roll(bed, made, (4,)), roll(bed, made, (4, 2, 1))
    assert sum(full.preemptions.values()) > 0, "KV was never short: the test shows nothing"
    assert seen.preemptions == full.preemptions
    assert seen.worlds[-2:] == [(2,), FULL]
    assert seen.same_as(full)


def test_late_request_to_a_parked_rank_restores_and_is_served(bed):
    made = requests([[60], [6, 20], [50], [8]], at={"r1-1": 25})
    full = roll(bed, made, (4,), expected=(1, 1, 1, 1))
    seen = roll(bed, made, (4, 2), expected=(1, 1, 1, 1))
    assert seen.worlds[:3] == [FULL, (0, 2), FULL]
    assert seen.same_as(full)


def test_a_rank_that_still_expects_a_request_is_not_complete(bed):
    made = requests([[60], [6, 5], [50], [8]], at={"r1-1": 25})
    seen = roll(bed, made, (4, 2), expected=(1, 2, 1, 1))
    worlds = seen.ranks[0].worlds
    assert set(worlds[:26]) == {FULL}, "a rank left before it had received what it was promised"
    assert (0, 2) in worlds[26:]


def test_topology_restore_leaves_ranks_asleep_until_they_are_woken(bed, greedy):
    made, full = greedy
    seen = roll(bed, made, (4, 2, 1), end="topology")
    assert seen.same_as(full)
    asleep = [result.status["asleep"] for result in seen.ranks]
    assert asleep[0]
    assert all(row == asleep[0] for row in asleep)
    assert all(status["asleep"] == [] for status in bed.call("wake_all"))
    assert roll(bed, made, (4, 2)).same_as(full)


def test_leavers_give_memory_back_and_the_log_says_so(bed, greedy):
    made, _ = greedy
    bed.call("loaded")
    before = len(events(bed, "sleep_end"))
    roll(bed, made, (4, 2, 1))
    ends = events(bed, "sleep_end")[before:]
    facts, held = bed.facts[0], bed.call("usage")[0]["backed_bytes"]
    assert len(ends) >= 2
    assert all(e["released_bytes"] == held for e in ends)
    commits = events(bed, "stage_commit")[-2:]
    assert all(
        set(c) >= {"agree", "prepare", "move", "switch", "capture", "first_step", "moved_bytes"} for c in commits
    )
    moved = [commit["moved_bytes"] for commit in commits]
    assert moved == [8 * facts["row_bytes"]] * 2, "half of the experts move to two ranks, half to one, no more"


def test_copies_of_the_same_weights_do_not_move_again(bed, greedy):
    made, full = greedy
    bed.call("loaded")
    moved = []
    for _ in range(2):
        assert roll(bed, made, (4, 2)).same_as(full)
        moved.append(events(bed, "stage_commit")[-1]["moved_bytes"])
    assert moved == [8 * bed.facts[0]["row_bytes"], 0]
    bed.call("loaded")
    assert roll(bed, made, (4, 2)).same_as(full)
    assert events(bed, "stage_commit")[-1]["moved_bytes"] == moved[0]


def test_planned_residency_moves_rows_before_the_first_token(bed, greedy):
    made, full = greedy
    bed.call("loaded")
    before = len(events(bed, "stage_commit")), len(events(bed, "rehearsal"))
    seen = roll(bed, made, (4, 2, 1), predicted=((0, 2), (0,)))
    assert seen.worlds[:3] == [FULL, (0, 2), (0,)]
    assert seen.same_as(full)
    assert [c["moved_rows"] for c in events(bed, "stage_commit")[before[0] :]] == [0, 0]
    rehearsals = [e for e in events(bed, "rehearsal")[before[1] :] if e["rank"] == 0]
    assert [(e["whole"], e["moved_rows"]) for e in rehearsals] == [(True, 16)]


def test_a_wrong_prediction_falls_back_to_natural_residency(bed, greedy):
    made, full = greedy
    assert roll(bed, made, (4,)).same_as(full)  # a step without prediction: no row is kept over the next weights
    bed.call("loaded")
    before = len(events(bed, "stage_commit"))
    seen = roll(bed, made, (4, 2), predicted=((1, 3),))
    assert seen.worlds == [FULL, (0, 2), FULL]
    assert seen.same_as(full)
    assert [c["moved_rows"] for c in events(bed, "stage_commit")[before:]] == [8]
