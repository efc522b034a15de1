"""The warm-up of a capture goes through the first layer with experts, the capture through all."""

import ast
import inspect
import textwrap
from itertools import islice

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from flexfloor.engine.devices.warm_path import WarmPath


class MoERunnerInterface(torch.nn.Module):
    """What vLLM takes for experts is told by this name."""


class Layer(torch.nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.mlp = MoERunnerInterface() if experts else torch.nn.Identity()


class Decoder(torch.nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(own) for own in experts)
        self.start_layer, self.end_layer = 0, len(experts)

    def forward(self):
        return len(list(islice(self.layers, self.start_layer, self.end_layer)))


class Model(torch.nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.model = decoder


@pytest.mark.parametrize(("experts", "short"), [((1, 1, 1, 1), 1), ((0, 0, 1, 1), 3), ((0, 0, 0), 3)])
def test_short_ends_with_the_first_experts_and_whole_is_whole_again(experts, short):
    decoder = Decoder(experts)
    path = WarmPath(Model(decoder))
    with path.short():
        assert decoder() == short
        with path.whole():
            assert decoder() == len(experts)
    assert decoder() == len(experts)


def test_a_capture_that_fails_leaves_the_model_whole():
    decoder = Decoder((1, 1))
    path = WarmPath(Model(decoder))
    with pytest.raises(RuntimeError), path.short():
        raise RuntimeError("no kernel")
    assert decoder() == 2


def test_a_model_that_is_built_otherwise_is_always_whole():
    path = WarmPath(torch.nn.Sequential(Layer(True), Layer(True)))
    with path.short(), path.whole():
        pass


def test_qwen3_moe_goes_through_the_layers_that_the_path_shortens():
    tree = ast.parse(textwrap.dedent(inspect.getsource(Qwen3MoeModel.forward)))
    (bounds,) = [
        [ast.unparse(argument) for argument in node.args]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "islice"
    ]
    assert bounds == ["self.layers", "self.start_layer", "self.end_layer"]


def test_the_profiler_of_a_capture_is_entered_between_warm_up_and_capture():
    """vLLM's own method over a runner that notes how deep each pass went."""
    decoder, passes = Decoder((1, 1, 1)), []
    path = WarmPath(Model(decoder))

    class Runner:
        def _dummy_run(self, *_, is_graph_capturing=False, **__):
            passes.append((is_graph_capturing, decoder()))

    class Desc:
        num_tokens, uniform, num_active_loras = 4, True, 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "synchronize", lambda: None)
        for warmups in (1, 0):
            with path.short():
                GPUModelRunner._warmup_and_capture(
                    Runner(), Desc, CUDAGraphMode.FULL, num_warmups=warmups, profiler=path.whole()
                )
    assert passes == [(False, 1), (True, 3), (True, 3)]
