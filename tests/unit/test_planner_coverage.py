"""The bound on ranks that the longest prompts need, against a matching found by trying."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.planner.coverage import PairCover

np = pytest.importorskip("numpy")


def fractional(safe):
    """Half of a maximum matching of the bipartite double cover, by trying every choice."""
    count = len(safe)

    @cache
    def most(left, used):
        if left == count:
            return 0
        best = most(left + 1, used)
        for right in range(count):
            if safe[left][right] and not used >> right & 1:
                best = max(best, 1 + most(left + 1, used | 1 << right))
        return best

    return most(0, 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.data())
def test_every_prefix_of_the_longest_is_bounded_by_its_matching(count, data):
    upper = data.draw(st.lists(st.booleans(), min_size=count * count, max_size=count * count))
    safe = np.triu(np.array(upper).reshape(count, count), 1)
    safe = safe | safe.T
    ranks = PairCover(safe).ranks
    for longest in range(count + 1):
        inner = safe[count - longest :, count - longest :]
        assert ranks[longest] == longest - fractional(tuple(map(tuple, inner.tolist()))) // 2


@pytest.mark.parametrize("count", [1, 2, 5, 8, 33])
def test_where_all_pairs_fit_two_prompts_need_one_rank(count):
    safe = ~np.eye(count, dtype=bool)
    assert PairCover(safe).ranks.tolist() == [-(-k // 2) for k in range(count + 1)]
