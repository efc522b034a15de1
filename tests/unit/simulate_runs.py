"""A small configuration, its workload and its simulated run, for the tests of whole runs."""

import pytest

from flexfloor.config import config_from_mapping
from flexfloor.simulate import Machine, drawn, simulate_workloads
from flexfloor.simulate.costs import H200
from flexfloor.simulate.workload import Distribution
from flexfloor.step_times import Row, StepTimes

np = pytest.importorskip("numpy")
TABLE = StepTimes([Row(ep, b, 0.004 * ep + 0.0005 * b) for ep in (1, 2, 4) for b in (1, 8, 16)])
SETTINGS = {
    "world_size": 4,
    "responses_per_prompt": 2,
    "step_prompts": 8,
    "num_experts": 16,
    "floors": {"natural": [1, 2, 4]},
    "kv": {"block_tokens": 4, "capacity": {"natural": {1: 400, 2: 400, 4: 400}}},
    "tail_guard": {"c_min": 16, "rounding": 8, "l_max": 90},
    "engine": {"max_num_seqs": 8},
}


def config(**changes):
    return config_from_mapping({**SETTINGS, **changes})


def workload(seed=0, epochs=2, correlation=0.6, items=16):
    spread = Distribution(np.arange(5, 101), np.linspace(1 / 96, 1, 96))
    return drawn(
        [(spread, 1.0)],
        items=items,
        responses=2,
        epochs=epochs,
        correlation=correlation,
        prompt_tokens=6,
        seed=seed,
    )


def simulated(settings=None, costs=H200, **more):
    chosen = settings or config()
    return simulate_workloads(chosen, {0: workload()}, Machine(TABLE, costs), **more)
