"""Engine options that vLLM does not accept: one line with what it says, before any engine process starts."""

import pytest
from driver_bed import RUN, config, settings

from flexfloor.driver.handles import LocalServer
from flexfloor.driver.spec import ServerSpec
from flexfloor.errors import RefusedError


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
    spec = ServerSpec.of(wanted, tiny_checkpoint, events_dir=tmp_path / "events", board=tmp_path / "board", run=RUN)
    before = processes_below()
    server = LocalServer(spec)
    try:
        with pytest.raises(RefusedError, match=said) as caught:
            server.start()
    finally:
        server.close()
    assert str(caught.value).endswith("; correct `engine.vllm`")
    assert "\n" not in str(caught.value)
    assert set(processes_below()) <= set(before)
