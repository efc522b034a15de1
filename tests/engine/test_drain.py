"""Batches in flight are taken in by vLLM's own step, which is given nothing to schedule."""

import contextlib
import queue
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

from vllm.v1.engine.core import EngineCore

from flexfloor.engine.core import tokens_left
from flexfloor.engine.rpc import CoreWorker


class Scheduler:
    """Has requests, must not be asked to schedule any."""

    def __init__(self):
        self.seen = []

    def has_requests(self):
        return True

    def schedule(self, *_):
        raise AssertionError("a batch was scheduled while batches are taken in")

    def update_from_output(self, scheduled, output):
        self.seen.append((scheduled, output))
        return {0: f"outputs of {scheduled}"}


def done(result):
    future = Future()
    future.set_result(result)
    return future


def engine_with(batches):
    """As much of an engine core as its step reads."""
    engine = SimpleNamespace(
        batch_queue=deque((done(f"tokens of {name}"), name, done(None)) for name in reversed(batches)),
        batch_queue_size=len(batches) + 1,
        scheduler=Scheduler(),
        model_executor=None,
        output_queue=queue.Queue(),
        capture_iteration_details=lambda _: contextlib.nullcontext(),
        log_error_detail=lambda _: contextlib.nullcontext(),
        _process_aborts_queue=lambda: None,
        _attach_iteration_details=lambda *_: None,
        post_step=lambda executed: None,
    )
    engine.step_fn = lambda: EngineCore.step_with_batch_queue(engine)
    return engine


def test_the_oldest_batch_comes_first_and_all_outputs_are_handed_on():
    engine = engine_with(["first", "second"])
    CoreWorker(engine).drain()
    assert not engine.batch_queue
    assert engine.scheduler.seen == [("first", "tokens of first"), ("second", "tokens of second")]
    assert [engine.output_queue.get_nowait() for _ in range(2)] == [
        (0, "outputs of first"),
        (0, "outputs of second"),
    ]
    assert engine.scheduler.has_requests(), "it schedules again afterwards"


def test_an_engine_without_a_queue_has_nothing_to_take_in():
    engine = engine_with([])
    engine.batch_queue = None
    CoreWorker(engine).drain()
    assert engine.scheduler.seen == []


def test_what_a_rank_may_still_give_leaves_out_what_is_in_flight():
    def request(most, given, flying):
        return SimpleNamespace(max_tokens=most, num_output_tokens=given, num_output_placeholders=flying)

    scheduler = SimpleNamespace(running=[request(10, 4, 1), request(9, 2, 0)], waiting=[request(6, 0, 0)])
    assert tokens_left(scheduler) == 7
    assert tokens_left(SimpleNamespace(running=[], waiting=[])) == 0
