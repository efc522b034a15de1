"""Engine options and prompts that vLLM does not accept: one line with what it says."""

import time

import pytest
from driver_bed import RUN, config, plan, settings, spec, step

from flexfloor.driver.handles import LocalServer
from flexfloor.driver.orders import Sampling, StepOrder, requests_of, step_digest
from flexfloor.errors import RefusedError
from flexfloor.workload import Prompt, Workload


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"no_such_option": 1}, "unexpected keyword argument 'no_such_option'"),
        ({"enable_sleep_mode": True}, "Sleep mode is not supported on current platform"),
        ({"gpu_memory_utilization": "most"}, "gpu_memory_utilization: Input should be a valid number"),
    ],
)
def test_what_vllm_says_is_told_with_the_remedy(tiny_checkpoint, tmp_path, processes_below, options, said):
    engine = settings()["engine"]
    wanted = config(engine={**engine, "vllm": {**engine["vllm"], **options}})
    before = processes_below()
    server = LocalServer(spec(tmp_path, tiny_checkpoint, wanted))
    try:
        with pytest.raises(RefusedError, match=said) as caught:
            server.start()
    finally:
        server.close()
    assert str(caught.value).endswith("; correct `engine.vllm`")
    assert "\n" not in str(caught.value)
    assert set(processes_below()) <= set(before)


def test_a_prompt_that_vllm_refuses_ends_the_step_at_once(tiny_checkpoint, tmp_path):
    wanted = config(engine={**settings()["engine"], "max_model_len": 64})
    asked = Workload([Prompt("p0", tuple(range(3, 20)), 8), Prompt("p1", tuple(range(3, 90)), 8)])
    planned = plan(step(0, [[0], [1], [], []], [8, 8], (4,)))
    ((one, requests),) = requests_of(planned, asked, wanted, epoch=0)
    rank_order, sampling = (0, 1, 2, 3), Sampling.of(wanted)
    order = StepOrder(step_digest(one, (4,)), 0, 0, (4,), rank_order, requests, sampling, RUN, str(tmp_path / "events"))
    server = LocalServer(spec(tmp_path, tiny_checkpoint, wanted))
    try:
        server.start()
        began = time.monotonic()
        with pytest.raises(RefusedError, match=r"refuses the prompt of item 'p1': .*64 tokens"):
            server.run_step(order)
        assert time.monotonic() - began < 10
    finally:
        server.close()
