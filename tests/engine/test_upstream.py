"""Every symbol of vLLM that we rely on is there; one that is gone or changed is named, with the tested versions."""

import pytest

from flexfloor.engine import upstream
from flexfloor.errors import UpstreamChangedError

ALL = (*upstream.COMMON, *upstream.CPU, *upstream.COMBINE, *upstream.DRIVER)


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
