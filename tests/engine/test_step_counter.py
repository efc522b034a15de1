"""The audit of model steps: replayed, with prompt tokens, or a decode step that lacks its graph."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from vllm import forward_context
from vllm.config import CUDAGraphMode

from flexfloor.engine.devices.step_counter import StepCounter

FULL, NONE = CUDAGraphMode.FULL, CUDAGraphMode.NONE


@pytest.fixture
def steps(monkeypatch):
    """``run(own, agreed, longest)``: a step that this rank would run in mode ``own`` and all agree to run otherwise."""
    module = ModuleType("a_runner")
    module.coordinate_batch_across_dp = lambda agreed, *, cudagraph_mode: (False, None, agreed)
    monkeypatch.setitem(sys.modules, "a_runner", module)
    now = SimpleNamespace()
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: now)
    monkeypatch.setattr(forward_context, "is_forward_context_available", lambda: True)

    class Wrapper:
        runtime_mode = FULL

        def __call__(self):
            return "output"

    class Runner:
        __module__ = "a_runner"

        def _dummy_run(self, step):
            return step()

    counter = StepCounter()
    counter.apply(Wrapper, Runner)

    def run(own, agreed=None, longest=1):
        if agreed is not None:
            module.coordinate_batch_across_dp(agreed.value, cudagraph_mode=own.value)
        now.cudagraph_runtime_mode = own if agreed is None else agreed
        now.attn_metadata = {"layer": SimpleNamespace(max_query_len=longest)}
        assert Wrapper()() == "output"

    return SimpleNamespace(counter=counter, run=run, dummy=lambda *step: Runner()._dummy_run(lambda: run(*step)))


def counted(steps):
    return steps.counter.read_full(), steps.counter.read_prefill()


def test_replayed_steps_and_steps_with_prompt_tokens(steps):
    for step in ((FULL, FULL), (FULL,), (NONE, NONE, 7), (NONE, None, 7)):
        steps.run(*step)
    assert counted(steps) == (2, 2)
    assert counted(steps) == (0, 0)


def test_a_decode_step_without_its_graph_is_neither(steps):
    steps.run(NONE, NONE)
    steps.run(NONE)
    assert counted(steps) == (0, 0)


def test_a_step_that_another_rank_made_eager_is_not_this_rank_s_fallback(steps):
    steps.run(FULL, NONE)
    assert counted(steps) == (0, 1)
    steps.run(NONE)
    assert counted(steps) == (0, 0), "the next step is judged by itself"


def test_dummy_steps_count_as_none(steps):
    steps.dummy(FULL, FULL)
    steps.dummy(FULL, NONE)
    steps.run(NONE)
    assert counted(steps) == (0, 0)
