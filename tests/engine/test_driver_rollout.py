"""The rollout server on real engines: plans in sequence, shrinking against not shrinking, refusals, late requests."""

import asyncio
from dataclasses import replace

import pytest
from driver_bed import RUN, config, plan, prompts, step

from flexfloor.driver.identity import compare_runs
from flexfloor.driver.orders import Sampling, StepOrder, requests_of, step_digest
from flexfloor.driver.rollout import run_plan
from flexfloor.driver.run_dir import RunDirectory
from flexfloor.errors import RefusedError
from flexfloor.events import read_events

LENGTHS = [12, 30, 20, 8, 16, 110, 24, 60]
GROUPS = [[0, 1], [2, 3], [4, 5], [6, 7]]
"""Rank 1 completes at 20, rank 0 at 30, rank 3 at 60, rank 2 at 110."""


def one_step(ladder, epoch=0):
    return plan(step(0, GROUPS, LENGTHS, ladder), epoch=epoch)


def arm(replica, folder, planned, *, settings=None, shrink=True):
    directory = RunDirectory(folder, settings or config())
    result = run_plan(planned, settings or config(), prompts(LENGTHS), replica, directory, run_id=RUN, shrink=shrink)
    directory.close()
    return directory, result


def of_kind(directory, name):
    return [event for event in read_events(directory.path).events if event.event == name]


def test_shrinking_changes_no_token_and_frees_the_ranks_that_are_done(replica, tmp_path):
    flex, result = arm(replica, tmp_path / "flex", one_step((4, 2, 1)))
    static, _ = arm(replica, tmp_path / "static", one_step((4, 2, 1)), shrink=False)
    found = compare_runs(flex.path, static.path)
    assert found.whole, found.first_difference
    assert found.total == len(LENGTHS)
    assert found.preemptions_equal
    assert [(event.fields["to"], event.fields["survivors"]) for event in of_kind(flex, "stage_commit")] == [
        (2, [2, 3]),
        (1, [2]),
    ]
    assert of_kind(static, "stage_commit") == []
    assert all(event.fields["released_bytes"] > 0 for event in of_kind(flex, "sleep_end"))
    assert result.report["problems"] == []
    low, high = result.report["occupied_rank_seconds"]
    assert high < 4 * result.report["window_seconds"]
    assert low <= high


def test_every_run_has_its_events_in_its_own_folder(replica, tmp_path):
    for epoch in (3, 4):
        directory, _ = arm(replica, tmp_path / f"epoch{epoch}", one_step((4, 2), epoch=epoch))
        events = read_events(directory.path).events
        assert {event.epoch for event in events} == {epoch}
        assert {event.rank for event in events} == {None, 0, 1, 2, 3}
        names = [event.event for event in sorted(events, key=lambda event: event.t)]
        assert names[0] == "rollout_start"
        assert names[-1] == "rollout_end"


def test_a_response_is_what_the_seed_says_not_the_epoch_before(replica, tmp_path):
    first, _ = arm(replica, tmp_path / "a", one_step((4,), epoch=5))
    again, _ = arm(replica, tmp_path / "b", one_step((4,), epoch=5))
    other, _ = arm(replica, tmp_path / "c", one_step((4,), epoch=6))
    assert compare_runs(first.path, again.path).whole
    tokens = {d.path.name: {tuple(r["token_ids"]) for r in responses(d)} for d in (first, other)}
    assert not tokens["a"] & tokens["c"]


def responses(directory):
    import json

    return [json.loads(line) for line in (directory.path / "responses.jsonl").read_text().splitlines()]


def test_a_plan_that_the_engines_refuse_leaves_them_usable(replica, tmp_path):
    impossible = one_step((4, 3))
    with pytest.raises(RefusedError, match="EP size 3"):
        arm(replica, tmp_path / "refused", impossible)
    _, result = arm(replica, tmp_path / "next", one_step((4, 2)))
    assert [one.responses for one in result.steps] == [len(LENGTHS)]


def test_a_late_request_for_a_parked_rank_is_served_by_a_member(replica, tmp_path):
    settings = config()
    ((planned, requests),) = requests_of(one_step((4, 2), epoch=7), prompts(LENGTHS), settings, 7)
    order = StepOrder(
        digest=step_digest(planned, planned.ladder),
        epoch=7,
        step=0,
        ladder=planned.ladder,
        rank_order=settings.leave_order,
        requests=requests,
        sampling=Sampling.of(settings),
        run=RUN,
        events_dir=str(tmp_path / "events"),
    )
    late = replace(requests[0], item_id="late", rank=1, max_tokens=6)

    async def scene():
        server = replica.server
        running = asyncio.ensure_future(server.run_step(order))
        while server.progress().world != 2 and not running.done():
            await asyncio.sleep(0.005)
        assert server.route(1) in (2, 3)
        one = await server.late(late)
        return one, await running

    one, rest = replica.wait(scene())
    assert one.rank in (2, 3)
    assert len(one.token_ids) == 6
    assert [len(response.token_ids) for response in rest] == [LENGTHS[int(r.item_id[1:])] for r in requests]
