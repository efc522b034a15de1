"""Orders, run directory, identity of runs and errors on their way: all without an engine."""

import json
from collections import Counter

import pytest
import yaml
from test_driver_checks import config, plan

from flexfloor import errors
from flexfloor.driver.handles import revived
from flexfloor.driver.identity import compare_runs
from flexfloor.driver.orders import Failure, Request, Response, Sampling, StepOrder, requests_of, step_digest
from flexfloor.driver.rollout import Watcher, bootstrap_plan, run_plan
from flexfloor.driver.run_dir import RunDirectory, observations
from flexfloor.driver.spec import ServerSpec
from flexfloor.errors import EngineLostError, InputError
from flexfloor.events import EventWriter, read_events
from flexfloor.history import Observation, read_lengths
from flexfloor.plan import EpochPlan
from flexfloor.workload import Prompt, Workload

WORKLOAD = Workload([Prompt("a", "x"), Prompt("b", (1, 2), max_tokens=9, n=3)])


def response(item="a", sample=0, tokens=(5, 6), *, reason="stop", cap=100, step_cap=False, logprobs=None, preempted=0):
    request = Request(item, sample, 0, "x", cap, 1, step_cap)
    return Response(request, 1, tuple(tokens), logprobs, reason, preempted, 4)


def capped(cap):
    step = plan().steps[0].model_copy(update={"cap": cap})
    return plan().model_copy(update={"steps": (step,)})


def test_requests_follow_plan_prompts_and_configuration():
    ((_, requests),) = requests_of(plan(), WORKLOAD, config(), epoch=3)
    assert Counter((r.item_id, r.rank) for r in requests) == {("a", 0): 2, ("b", 1): 3}
    assert [r.sample for r in requests if r.item_id == "b"] == [0, 1, 2]
    assert {r.max_tokens for r in requests if r.item_id == "a"} == {16384}
    assert {r.max_tokens for r in requests if r.item_id == "b"} == {9}
    assert len({r.seed for r in requests}) == 5


def test_seeds_do_not_depend_on_rank_or_step():
    here = {(r.item_id, r.sample): r.seed for _, rs in requests_of(plan(), WORKLOAD, config(), 1) for r in rs}
    there = plan(items=("b", "a"))
    assert here == {(r.item_id, r.sample): r.seed for _, rs in requests_of(there, WORKLOAD, config(), 1) for r in rs}
    assert not set(here.values()) & {r.seed for _, rs in requests_of(plan(), WORKLOAD, config(), 2) for r in rs}


def test_an_item_that_stands_twice_goes_on_counting_its_samples():
    ((_, requests),) = requests_of(plan(items=("a", "a")), WORKLOAD, config(), epoch=0)
    assert [(r.rank, r.sample) for r in requests] == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_the_step_cap_is_told_from_other_limits():
    ((_, requests),) = requests_of(capped(64), WORKLOAD, config(), epoch=0)
    assert {(r.item_id, r.max_tokens, r.step_cap) for r in requests} == {("a", 64, True), ("b", 9, False)}
    ((_, requests),) = requests_of(capped(16384), WORKLOAD, config(), epoch=0)
    assert not any(r.step_cap for r in requests)


def test_an_order_says_what_every_rank_expects():
    ((step, requests),) = requests_of(plan(), WORKLOAD, config(), epoch=0)
    order = StepOrder(step_digest(step, (4,)), 0, 0, (4,), (0, 1, 2, 3), requests, Sampling(), "r", "/events")
    assert order.expected == [2, 3, 0, 0]
    assert json.loads(json.dumps(order.installation()))["expected"] == [2, 3, 0, 0]
    assert step_digest(step, (4,)) != step_digest(step, (4, 2))


def test_censored_is_a_step_cap_that_stopped_a_response():
    assert response(tokens=range(8), reason="length", cap=8, step_cap=True).censored
    assert not response(tokens=range(8), reason="length", cap=8).censored
    assert not response(tokens=range(8), reason="stop", cap=8, step_cap=True).censored


def test_a_response_cut_by_the_longest_sequence_is_no_natural_length():
    assert response(tokens=range(5), reason="length", cap=8).censored
    assert response(tokens=range(5), reason="length", cap=8).stopped_by_cap
    assert not response(tokens=range(5), reason="stop", cap=8).censored


def test_the_history_learns_one_observation_an_item():
    seen = observations(
        2,
        [
            response(sample=1, tokens=range(8), reason="length", cap=8, step_cap=True),
            response("b", tokens=(1,)),
            response(sample=0, tokens=(1, 2, 3)),
        ],
    )
    assert seen == [Observation("a", 2, 4, (3, 8), (1,)), Observation("b", 2, 4, (1,), ())]


def test_a_run_directory_holds_what_the_specification_says(tmp_path):
    settings = config()
    run = RunDirectory(tmp_path / "run", settings)
    run.begin(plan(), 1)
    run.finish_step(1, 0, [response(logprobs=(-0.1, -2.5)), response(sample=1)])
    run.close()
    assert yaml.safe_load((run.path / "config.yaml").read_text())["flexfloor"] == settings.resolved()
    assert EpochPlan.load(run.path / "plan.json") == plan()
    first, second = map(json.loads, (run.path / "responses.jsonl").read_text().splitlines())
    assert first == {
        "item_id": "a",
        "epoch": 1,
        "step": 0,
        "sample": 0,
        "rank": 1,
        "token_ids": [5, 6],
        "logprobs": [-0.1, -2.5],
        "finish_reason": "stop",
        "num_preempted": 0,
    }
    assert "logprobs" not in second
    assert read_lengths(run.path / "lengths.jsonl") == [Observation("a", 1, 4, (2, 2), ())]


def test_an_epoch_that_was_cut_off_is_not_run_again_over_its_events(tmp_path):
    run = RunDirectory(tmp_path / "run", config())
    run.begin(plan(), 1)
    with EventWriter(run.events_dir / "driver.jsonl", run="run") as events:
        events.emit("rollout_start", epoch=1, step=0, world_size=4)
    run.begin(plan(), 2)
    with pytest.raises(InputError, match="holds epoch 1 already"):
        run.begin(plan(), 1)


def test_an_epoch_is_run_once_in_a_directory(tmp_path):
    run = RunDirectory(tmp_path / "run", config())
    run.begin(plan(), 1)
    run.finish_step(1, 0, [response()])
    run.begin(plan(), 2)
    with pytest.raises(InputError, match="holds epoch 1 already"):
        run.begin(plan(), 1)


class Pretended:
    """A server that answers from a script: a list of responses or an error a step."""

    spec = None

    def __init__(self, *script):
        self.script, self.orders = list(script), []

    def run_step(self, order, observe):
        self.orders.append(order)
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [response(r.item_id, r.sample, tokens=(7,) * 3) for r in order.requests]


def two_steps():
    step = plan().steps[0]
    return plan().model_copy(update={"steps": (step, step.model_copy(update={"step": 1}))})


def test_a_lost_step_leaves_the_finished_ones_whole(tmp_path):
    run = RunDirectory(tmp_path / "run", config())
    server = Pretended([], EngineLostError(2, "stage", "killed"))
    with pytest.raises(EngineLostError):
        run_plan(two_steps(), config(), WORKLOAD, server, run)
    assert run.history.last_step == 0
    assert {line["step"] for line in map(json.loads, (run.path / "responses.jsonl").read_text().splitlines())} == {0}
    log = read_events(run.path)
    assert [event.event for event in log.events] == ["rollout_start", "rollout_end", "rollout_start"]
    assert log.events[1].fields["response_tokens"] == 15


def test_without_shrinking_only_the_ladder_differs(tmp_path):
    orders = {}
    for shrink in (True, False):
        run = RunDirectory(tmp_path / str(shrink), config())
        server = Pretended([], [])
        done = []
        watcher = Watcher()
        watcher.finished = done.append
        result = run_plan(two_steps(), config(), WORKLOAD, server, run, shrink=shrink, watcher=watcher)
        assert list(result.steps) == done
        orders[shrink] = server.orders
    assert [order.ladder for order in orders[True]] == [(4, 2)] * 2
    assert [order.ladder for order in orders[False]] == [(4,)] * 2
    assert [order.requests for order in orders[True]] == [order.requests for order in orders[False]]


def test_the_bootstrap_epoch_does_not_shrink():
    made = bootstrap_plan(config(), WORKLOAD, 0)
    assert made.epoch == 0
    assert [step.ladder for step in made.steps] == [(4,)]


def runs(tmp_path, *responses):
    folders = []
    for index, content in enumerate(responses):
        run = RunDirectory(tmp_path / f"run{index}", config())
        run.begin(plan(), 1)
        run.finish_step(1, 0, content)
        folders.append(run.path)
    return compare_runs(*folders)


def test_identical_runs(tmp_path):
    same = runs(tmp_path, [response(logprobs=(-1.0, -2.0))], [response(logprobs=(-1.0, -2.0))])
    assert same.whole
    assert same.preemptions_equal
    assert str(same) == "1 of 1 requests identical"


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (response(tokens=(5, 7), logprobs=(-1.0, -2.0)), "token_ids differ from place 1"),
        (response(tokens=(5,), logprobs=(-1.0,)), "token_ids differ in length"),
        (response(logprobs=(-1.0, -2.0000000000000004)), "logprobs differ from place 1"),
        (response(logprobs=(-1.0, -2.0), reason="length"), "finish_reason"),
        (response("b", logprobs=(-1.0, -2.0)), "only in the first run"),
    ],
)
def test_runs_that_differ(tmp_path, other, what):
    found = runs(tmp_path, [response(logprobs=(-1.0, -2.0))], [other])
    assert not found.whole
    assert what in found.first_difference


def test_preemptions_are_compared(tmp_path):
    found = runs(tmp_path, [response()], [response(preempted=1)])
    assert found.whole
    assert not found.preemptions_equal


@pytest.mark.parametrize(
    "error",
    [
        errors.EngineLostError(2, "stage", "killed"),
        errors.TransitionError(1, "park", "no room"),
        errors.RefusedError("too few rows", remedy="plan again"),
        errors.FlexFloorError("odd"),
    ],
)
def test_errors_keep_their_fields_on_the_way(error):
    import asyncio

    from flexfloor.driver.handles import _reported

    async def fail():
        raise error

    failure = asyncio.run(_reported(fail()))
    assert isinstance(failure, Failure)
    again = revived(failure)
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_a_server_is_started_as_configured(tmp_path):
    settings = config(
        engine={
            "combine": "invariant",
            "kv_cache_bytes": 1024,
            "max_num_seqs": 7,
            "vllm": {"skip_tokenizer_init": True},
        }
    )
    spec = ServerSpec.of(settings, "model", events_dir=tmp_path, board=tmp_path / "board", run="r")
    assert spec.settings.smallest_floor == 1
    assert spec.settings.combine == "invariant"
    assert spec.engine["data_parallel_size"] == 4
    assert spec.engine["max_num_seqs"] == 7
    assert spec.engine["skip_tokenizer_init"] is True
    assert "max_model_len" not in spec.engine
    assert spec.stall_s > settings.engine.deadline_s
    assert "FLEXFLOOR_ENGINE" in spec.environment()
