"""The five methods of DPEngineCoreProc that are replaced, and the two utilities that are added.

General plugins are loaded inside ``EngineCore.__init__``, after the class was chosen, so methods
are replaced on the class. Each calls the original; without FlexFloor settings nothing else.
"""

from __future__ import annotations

from typing import Any

from flexfloor.engine.core import ElasticCore
from flexfloor.engine.settings import EngineSettings
from flexfloor.engine.upstream import replace
from flexfloor.errors import ProtocolError


def elastic_of(engine: Any) -> ElasticCore | None:
    """The FlexFloor part of an engine core, None for engines that do not use it."""
    elastic: ElasticCore | None = engine.__dict__.get("_flexfloor")
    return elastic


def required(engine: Any) -> ElasticCore:
    """The FlexFloor part of an engine core that must have one.

    Raises:
        ProtocolError: the engine was started without FlexFloor.
    """
    elastic = elastic_of(engine)
    if elastic is None:
        raise ProtocolError("this engine was started without the FlexFloor worker extension")
    return elastic


def patch() -> None:
    """Replace the five methods named in :mod:`flexfloor.engine.upstream` and add two utilities."""
    from vllm.v1.engine.core import DPEngineCoreProc

    run_busy_loop = DPEngineCoreProc.run_busy_loop
    has_global = DPEngineCoreProc._has_global_unfinished_reqs
    engine_step = DPEngineCoreProc._process_engine_step
    dummy_batch = DPEngineCoreProc.execute_dummy_batch
    add_request = DPEngineCoreProc.add_request

    def _run_busy_loop(self: Any) -> Any:
        settings = EngineSettings.from_env()
        if settings is not None and self.vllm_config.parallel_config.worker_extension_cls == settings.extension:
            self.__dict__["_flexfloor"] = ElasticCore(self, settings)
        return run_busy_loop(self)

    def _has_global_unfinished_reqs(self: Any, local_unfinished: bool) -> bool:
        elastic = elastic_of(self)
        return has_global(self, local_unfinished) if elastic is None else elastic.sync(local_unfinished)

    def _process_engine_step(self: Any) -> bool:
        elastic = elastic_of(self)
        return engine_step(self) if elastic is None else elastic.step(lambda: engine_step(self))

    def execute_dummy_batch(self: Any) -> None:
        elastic = elastic_of(self)
        if elastic is None:
            dummy_batch(self)
        else:
            elastic.dummy(lambda: dummy_batch(self))

    def _add_request(self: Any, request: Any, request_wave: int = 0) -> None:
        elastic = elastic_of(self)
        if elastic is not None:
            elastic.arrived(request)
        add_request(self, request, request_wave)

    def flexfloor_install(self: Any, text: str) -> str:
        return required(self).install(text)

    def flexfloor_call(self: Any, name: str, text: str) -> str:
        return required(self).call(name, text)

    replace(DPEngineCoreProc, "run_busy_loop", _run_busy_loop)
    replace(DPEngineCoreProc, "_has_global_unfinished_reqs", _has_global_unfinished_reqs)
    replace(DPEngineCoreProc, "_process_engine_step", _process_engine_step)
    replace(DPEngineCoreProc, "execute_dummy_batch", execute_dummy_batch)
    replace(DPEngineCoreProc, "add_request", _add_request)
    DPEngineCoreProc.flexfloor_install = flexfloor_install
    DPEngineCoreProc.flexfloor_call = flexfloor_call
