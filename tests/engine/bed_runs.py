"""Rollouts for the in-process bed, and what two of them have in common."""

import itertools
import json
from dataclasses import dataclass

from flexfloor.engine.testbed import BedRequest, Rollout

_steps = itertools.count()


def requests(lengths, *, prompts=None, temperature=0.0, at=None):
    """Requests ``r<rank>-<i>`` with these lengths by rank; ``prompts`` gives prompt lengths by name."""
    made = []
    for rank, row in enumerate(lengths):
        for i, length in enumerate(row):
            name = f"r{rank}-{i}"
            size = (prompts or {}).get(name, 9)
            tokens = tuple(5 + (31 * rank + 7 * i + 3 * k) % 480 for k in range(size))
            made.append(
                BedRequest(name, rank, tokens, length, temperature, seed=100 * rank + i, at=(at or {}).get(name, 0))
            )
    return tuple(made)


@dataclass
class Seen:
    """A rollout's outcome, all ranks together."""

    tokens: dict
    logprobs: dict
    preemptions: dict
    worlds: list
    ranks: list

    def same_as(self, other):
        """Every token and every log-probability equal, request by request."""
        assert self.tokens.keys() == other.tokens.keys()
        different = [n for n in self.tokens if self.tokens[n] != other.tokens[n]]
        assert not different, f"tokens differ: {different}"
        different = [n for n in self.logprobs if self.logprobs[n] != other.logprobs[n]]
        assert not different, f"logprobs differ: {different}"
        return True


def roll(bed, made, ladder, **options):
    """Run a rollout; ``worlds`` lists the EP groups in the order they came."""
    results = bed.run(Rollout(made, ladder, step=next(_steps), **options))
    merged = Seen({}, {}, {}, [], results)
    for result in results:
        merged.tokens.update(result.tokens)
        merged.logprobs.update(result.logprobs)
        merged.preemptions.update(result.preemptions)
    assert all(result.worlds == results[0].worlds for result in results), "ranks saw different worlds"
    merged.worlds = [world for world, _ in itertools.groupby(results[0].worlds)]
    assert merged.tokens.keys() == {r.name for r in made}, "a request was lost"
    assert all(len(merged.tokens[r.name]) == r.max_tokens for r in made)
    return merged


def events(bed, name):
    """Events of this name so far, of all ranks, in the order they happened."""
    found = []
    for path in sorted(bed.events_dir.glob("rank-*.jsonl")):
        found += [e for e in map(json.loads, path.read_text().splitlines()) if e["event"] == name]
    return sorted(found, key=lambda event: event["t"])
