"""Every symbol of vLLM that we rely on is there; one that is gone or changed is named, with the tested versions."""

import os
import subprocess
import sys

import pytest

from flexfloor.engine import upstream
from flexfloor.engine.settings import EngineSettings
from flexfloor.errors import UpstreamChangedError

ALL = (*upstream.COMMON, *upstream.CPU, *upstream.CUDA, *upstream.COMBINE, *upstream.DRIVER)


@pytest.mark.parametrize("symbol", ALL, ids=lambda symbol: symbol.name)
def test_symbol_is_there_and_takes_what_we_give(symbol):
    upstream.check((symbol,))


def test_a_symbol_that_is_gone_is_named(monkeypatch):
    from vllm.v1.engine.core import DPEngineCoreProc

    monkeypatch.delattr(DPEngineCoreProc, "_has_global_unfinished_reqs")
    with pytest.raises(UpstreamChangedError, match=r"_has_global_unfinished_reqs is gone .* tested with vllm 0\.30\.0"):
        upstream.check(upstream.COMMON)


def test_a_lost_parameter_is_named(monkeypatch):
    from vllm.v1.engine.core import DPEngineCoreProc

    monkeypatch.setattr(DPEngineCoreProc, "add_request", lambda self, request: None)
    with pytest.raises(UpstreamChangedError, match=r"add_request lost the parameters \['request_wave'\]"):
        upstream.check(upstream.COMMON)


def test_an_untested_version_is_refused(monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    with pytest.raises(UpstreamChangedError, match=r"0\.31\.0 was not tested"):
        upstream.check_version()


PATCHED_THEN_CHECKED = """
from flexfloor.engine import plugin, upstream
plugin.register()
from vllm.v1.engine.core import DPEngineCoreProc
assert "flexfloor" in DPEngineCoreProc.run_busy_loop.__code__.co_filename
upstream.check((*upstream.COMMON, *upstream.CPU, *upstream.COMBINE))
"""


def test_a_process_that_is_already_patched_passes_the_check(tmp_path):
    settings = EngineSettings(
        world_size=4, smallest_floor=1, combine="invariant", events_dir=str(tmp_path), board=str(tmp_path / "board")
    )
    environment = {**os.environ, **settings.export()}
    command = [sys.executable, "-c", PATCHED_THEN_CHECKED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
