"""Lengths of what was generated and kept, joined to items."""

from verl_integration.epochs import Placement
from verl_integration.harvest import gather, observations

A = Placement("a", 0, 0, 1, (0, 1), (0, 1), (7, 8), 32)
B = Placement("b", 1, 0, 0, (2, 3), (2, 3), None, None)


def test_responses_are_keyed_by_item_and_sample_whatever_the_order_of_rows():
    keys = ["u2_1_0", "u1_0_0", "u2_0_0", "u1_1_0"]
    kept = gather(keys, [5, 9, 5, 9], [208, 31, 40, 32], {"u1": A, "u2": B}, 208)
    seen = {o.item_id: o for o in observations(1, kept)}
    assert seen["a"].lengths == (31, 32)
    assert seen["a"].censored == (1,)
    assert seen["b"].lengths == (40, 208)
    assert seen["b"].censored == ()
    assert seen["b"].prompt_tokens == 5
    assert [one.at_limit for one in kept] == [True, False, False, False]


def test_several_outputs_of_a_session_are_one_response():
    kept = gather(["u1_0_0", "u1_0_1", "u1_1_0"], [9, 20, 9], [4, 6, 3], {"u1": A}, 208)
    assert [(one.sample, one.tokens, one.prompt_tokens) for one in kept] == [(0, 10, 9), (1, 3, 9)]


def test_an_empty_response_is_no_observation():
    kept = gather(["u1_0_0", "u1_1_0"], [9, 9], [0, 3], {"u1": A}, 208)
    assert observations(0, kept)[0].lengths == (3,)
    assert observations(0, kept[:1]) == []
