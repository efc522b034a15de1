"""Tests on CUDA devices; skipped, with the reason, where there are fewer than two (or a module's `DEVICES`)."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def _missing(wanted=2):
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    here = torch.cuda.device_count()
    return f"{wanted} CUDA devices are needed, found: {here}" if here < wanted else None


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    mine = [item for item in items if here in Path(item.fspath).parents]
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        reason = _missing(getattr(item.module, "DEVICES", 2))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def gpu():
    """The module behind the measurements."""
    sys.path.insert(0, str(TOOLS))
    import gpu_elastic

    return gpu_elastic


@pytest.fixture(scope="session")
def serving(gpu, tmp_path_factory):
    """For a while a server of two ranks: seeded weights of the small shape, poisoned rows, captured decode graphs."""

    @contextmanager
    def start(**options):
        folder = tmp_path_factory.mktemp("gpu")
        model = gpu.write_weights(folder / "model", gpu.SHAPES["small"])
        spec = gpu.server_spec(model, folder, dummy=False, poison=True, use=0.3, **options)
        running = gpu.Bench(spec, folder, limit_s=540.0)
        try:
            yield running
        finally:
            running.server.close()

    return start


@pytest.fixture(scope="session")
def bench(serving):
    """A server with the invariant combine."""
    with serving(combine="invariant") as running:
        yield running


@pytest.fixture(scope="session")
def four(gpu, tmp_path_factory):
    """As `bench`, four ranks, one KV size for all floors; rank 0 fails in its third trial step."""
    reason = _missing(4)
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("four")
    model = gpu.write_weights(folder / "model", gpu.SHAPES["small"])
    running = gpu.Bench(gpu.four_ranks(model, folder, faults=("trial:0:raise:3",)), folder, limit_s=540.0)
    yield running
    running.server.close()


@pytest.fixture(scope="module")
def load(gpu):
    """Rank 0 has 24 long responses, rank 1 eight short ones."""
    return gpu.Load((tuple(90 if i % 2 else 60 for i in range(24)), (20,) * 8), prompt=40)


@pytest.fixture(scope="module")
def static(bench, load):
    """Record of the full world, the reference of the module's rollouts."""
    bench.arm("static", load, (2,))
    return bench.records[-1]
