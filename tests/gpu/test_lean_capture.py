"""The stock combine: one decode graph at the shrink, smaller ones as the load falls, kept ones afterwards."""

import pytest
from records import checked, eager


@pytest.fixture(scope="module")
def production(serving):
    """A server with vLLM's own combine."""
    with serving(combine="stock") as running:
        yield running


@pytest.fixture(scope="module")
def falling(gpu):
    """Rank 0 has 24 responses, from the 40th token on eight; rank 1 eight short ones."""
    return gpu.Load(((40,) * 16 + (160,) * 8, (20,) * 8), prompt=40)


def test_the_shrink_captures_one_graph_and_a_smaller_one_follows(production, falling):
    arm = production.arm("flex", falling, (2, 1))
    record = checked(production.records[-1])
    (transition,) = record["transitions"]
    assert (transition["captured"], transition["kept"]) == ([32], []), "24 requests fit the bucket of 32"
    assert [event["sizes"] for event in arm.named("capture_end")] == [[8]]
    assert eager(record) == 0
    assert [len(response.token_ids) for response in arm.responses] == [*falling.lengths[0], *falling.lengths[1]]


def test_both_are_kept_for_the_next_shrink(production, falling):
    arm = production.arm("flex again", falling, (2, 1))
    record = checked(production.records[-1])
    (transition,) = record["transitions"]
    assert (transition["captured"], transition["kept"]) == ([], [8, 32])
    assert arm.named("capture_end") == []
    assert eager(record) == 0
