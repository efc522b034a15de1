"""How far responses agree with vLLM's stock combine: stock EP 1 against stock EP N, a shrinking rollout against EP N.

The stock combine adds the ranks' sums in the model's dtype, so another EP size may give other last bits, and greedy
responses part where two tokens are that close. A rollout that shrinks must agree with one that keeps EP N no less than
stock vLLM agrees with itself at EP 1 and EP N, on the same requests.

Three engines one after another: vLLM untouched at EP 1, vLLM untouched at EP N, FlexFloor's server (static and flex);
what is known is written after each.
On CPU vLLM untouched has no expert parallelism: FlexFloor's static rollout stands in for it.

Usage: python tools/gpu_agreement.py --json agreement.json [--shape small] [--ladder 2 1] [--model DIR for the CPU]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.arms import Load, compare
from gpu.bench import Bench, versions
from gpu.serving import section, spec_of
from gpu.shapes import SHAPES, write_weights
from gpu_elastic import lengths
from unplanned import untouched

from flexfloor.config import FlexFloorConfig, config_from_mapping
from flexfloor.driver.engines import Engines
from flexfloor.driver.orders import Request, Response, Sampling

SAMPLING = Sampling(temperature=0.0, ignore_eos=True, logprobs=True)


def stock(config: FlexFloorConfig, model: Path, folder: Path, requests: Sequence[Request], ep: int) -> list[Response]:
    """Responses of vLLM untouched at this EP size."""
    spec = spec_of(config, model, folder)
    if ep == 1:
        spec.engine.update(data_parallel_size=1, enable_expert_parallel=False)
    with untouched(spec):
        return asyncio.run(_served(spec, requests, ep))


async def _served(spec: Any, requests: Sequence[Request], ep: int) -> list[Response]:
    engines = await asyncio.to_thread(Engines.start, spec)
    try:
        queues = [await engines.submit(f"{i}", r, SAMPLING, r.rank % ep) for i, r in enumerate(requests)]
        return list(await asyncio.gather(*(_response(r, q) for r, q in zip(requests, queues, strict=True))))
    finally:
        engines.shut_down()


async def _response(request: Request, queue: Any) -> Response:
    tokens: list[int] = []
    logprobs: list[float] = []
    while True:
        output = queue.get_nowait() or await queue.get()
        new = output.outputs[0]
        tokens += new.token_ids
        logprobs += [step[token].logprob for token, step in zip(new.token_ids, new.logprobs or (), strict=True)]
        if output.finished:
            return Response(request, request.rank, tuple(tokens), tuple(logprobs), new.finish_reason, 0, 0)


def main() -> None:
    """Run the three engines and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--model", type=Path, help="a checkpoint of one's own, without graphs and sleep mode (CPU)")
    parser.add_argument("--use", type=float, default=0.5, help="share of a device's memory for the engine")
    parser.add_argument("--ladder", type=int, nargs="+", default=[2, 1], help="EP sizes; one device a rank")
    parser.add_argument("--requests", type=int, default=64, help="long requests, all on rank 0")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = SHAPES[options.shape]
        model = options.model or write_weights(folder / "model", shape)
        vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        world, *floors = options.ladder
        made = section(dummy=False, combine="stock", use=options.use, world_size=world, floors=floors)
        if options.model is not None:
            made["engine"] |= {"vllm": {"skip_tokenizer_init": True}, "max_model_len": 512}
        config = config_from_mapping(made)
        long = tuple(160 if i % 2 else 110 for i in range(options.requests))
        load = Load(lengths(options.ladder, long, 40, 25), vocabulary=vocabulary)
        requests = load.requests()
        own = slice(0, len(long))
        found: dict[str, Any] = {}
        result: dict[str, Any] = {"requests": len(long), "compared": found}
        if options.model is None:
            result |= {"shape": options.shape, "versions": versions()}

        def keep(label: str, one: Sequence[Response], other: Sequence[Response]) -> None:
            row = found[label] = compare(one[own], other[own])
            options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
            print(f"{label}: tokens {row['same_tokens']} of {row['requests']}, first split {row['first_splits'][:1]}")

        alone = stock(config, model, folder / "ep1", requests, 1)
        if options.model is None:
            joint = stock(config, model, folder / f"ep{world}", requests, world)
            keep(f"stock EP 1 against stock EP {world}", joint, alone)
        bench = Bench(spec_of(config, model, folder / "ours"), folder / "ours", 280.0)
        try:
            static = bench.arm("static", load, (world,)).responses
            flex = bench.arm("flex", load, tuple(options.ladder)).responses
            result["transitions"] = bench.records[1]["transitions"]
            keep("flex against static", static, flex)
            again = bench.arm("static again", load, (world,)).responses
            keep("static against static", static, again)
        finally:
            bench.server.close()
        if options.model is None:
            keep(f"static against stock EP {world}", joint, static)
        else:
            keep(f"stock EP 1 against static EP {world}", static, alone)


if __name__ == "__main__":
    main()
