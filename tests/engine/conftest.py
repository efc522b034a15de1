"""What the engine tests share: a tiny checkpoint, and one replica that several tests use in turn."""

from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.fspath).parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """Folder of a random Qwen3-MoE with 16 experts, no tokenizer."""
    import tiny_checkpoint

    return tiny_checkpoint.make(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def replica(tmp_path_factory, tiny_checkpoint):
    """A started server of four ranks with room for floor 1, the invariant combine and poisoned rows."""
    from driver_bed import config, local_server

    server = local_server(tmp_path_factory.mktemp("replica"), tiny_checkpoint, config())
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def processes_below():
    """Live processes below this one, but for multiprocessing's own."""

    def below():
        return [process for process in psutil.Process().children(recursive=True) if _matters(process)]

    return below


def _matters(process):
    try:
        own = process.pid == forkserver._forkserver._forkserver_pid or "resource_tracker" in " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and not own
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def bed(tmp_path_factory, tiny_checkpoint):
    """Four in-process engines: small KV (preemptions), short prefill chunks, poisoned rows, the invariant combine."""
    from flexfloor.driver import children
    from flexfloor.engine.settings import EngineSettings
    from flexfloor.engine.testbed import Bed

    folder = tmp_path_factory.mktemp("bed")
    settings = EngineSettings(
        world_size=4,
        smallest_floor=1,
        combine="invariant",
        poison=True,
        deadline_s=8.0,
        events_dir=str(folder / "events"),
        board=str(folder / "board"),
        run="bed",
    )
    options = {
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 1 << 20,
        "max_num_batched_tokens": 48,
        "enable_prefix_caching": False,
    }
    children.warm_up()
    running = Bed(tiny_checkpoint, settings, options=options, context=children.ForkServer())
    running.events_dir = folder / "events"
    try:
        yield running
    finally:
        running.close()
