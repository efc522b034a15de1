import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_cases import limits, requests
from simulate_oracle import SlowRank

from flexfloor.errors import InputError
from flexfloor.simulate import Limits, Request, run_rank


def slow(own, bounds):
    rank, composition = SlowRank(own, bounds), []
    while not rank.complete:
        rank.drop_preempted()
        rank.step()
        composition.append((rank.decode, rank.prefill, rank.context))
        assert rank.iterations < 2000
    return rank, composition


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_leaps_do_what_single_iterations_do(data):
    own = data.draw(requests())
    bounds = data.draw(limits([own]))
    trace = run_rank(own, bounds)
    rank, composition = slow(own, bounds)
    leapt = [
        (phase.decode, phase.prefill, phase.context + k * phase.decode)
        for phase in trace.phases
        for k in range(phase.end - phase.start)
    ]
    assert leapt == composition
    assert sorted(trace.finished) == sorted(rank.finished)
    assert [(p.iteration, p.request) for p in trace.preemptions] == rank.preemptions
    assert sorted(index for _, index in trace.finished) == list(range(len(own)))


def test_a_request_takes_one_iteration_a_token():
    trace = run_rank([Request("a", 5, 7), Request("b", 5, 3)], Limits())
    assert trace.end == 7
    assert trace.finished == [(3, 1), (7, 0)]
    assert [phase[:4] for phase in trace.phases] == [(0, 1, 0, 10), (1, 3, 2, 0), (3, 7, 1, 0)]


def test_siblings_compute_a_shared_prompt_once():
    own = [Request("a", 9, 2)] * 3
    assert run_rank(own, Limits(block_tokens=4)).phases[0].prefill == 9 + 1 + 1
    assert run_rank(own, Limits(block_tokens=4, prompt_sharing=False)).phases[0].prefill == 27


def test_the_latest_request_is_preempted_and_computed_anew():
    own = [Request("a", 2, 6), Request("b", 2, 6)]
    trace = run_rank(own, Limits(kv_blocks=8, prompt_sharing=False))
    assert [(lost.iteration, lost.request, lost.tokens) for lost in trace.preemptions] == [(3, 1, 4)]
    assert trace.finished == [(6, 0), (9, 1)]
    assert [phase.prefill for phase in trace.phases if phase.prefill] == [4, 5]


def test_max_num_seqs_makes_the_rest_wait():
    trace = run_rank([Request("a", 1, 3), Request("b", 1, 3)], Limits(max_num_seqs=1))
    assert trace.end == 6


def test_a_response_that_never_fits_is_refused():
    with pytest.raises(InputError, match="item 'a': a response of 9 tokens never fits into 8 KV tokens"):
        run_rank([Request("a", 1, 9)], Limits(kv_blocks=8))
