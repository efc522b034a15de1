"""The server's side of a step, with engines played by the test: what is installed, what is lost, what ends it."""

import asyncio
import json

import pytest
from test_epochs import config, epoch_steps

from flexfloor.driver.engines import CallFailedError
from flexfloor.elastic.board import Board, Status, beat
from flexfloor.elastic.states import Phase, RankState
from flexfloor.errors import EngineLostError
from verl_integration.orders import StepReport, Turn, installation
from verl_integration.section import RunSettings

WORLD = 4


class Engines:
    """Plays engines and client; ``calls`` has everything they were asked."""

    def __init__(self, board):
        self.board, self.calls, self.refusal, self.digest = board, [], None, None
        self.core_engines = list(range(WORLD))
        self.engine_core = self

    def show(self, step, state=RankState.FULL):
        for rank in range(WORLD):
            self.board.write(rank, Status(state, Phase.IDLE, WORLD, 0, 1, step, beat(), 1))

    async def reset_prefix_cache(self):
        self.calls.append(("reset_prefix_cache",))

    async def install(self, order, _):
        self.calls.append(("install", order["digest"]))
        if self.refusal:
            raise CallFailedError(2, self.refusal, {})
        self.show(order["step"], RankState.MEMBER)
        return [{"digest": self.digest or order["digest"]}] * WORLD

    async def call(self, name, values, _):
        self.calls.append((name, values))
        if name == "withdraw":
            self.show(-1)
        return [{"step": None, "members": list(range(WORLD)), "rank": rank, "phase": "idle"} for rank in range(WORLD)]

    async def _call_utility_async(self, _, name, text, engine):
        self.calls.append((name, json.loads(text), engine))


class Watchdog:
    def step_begins(self):
        pass


@pytest.fixture
def order():
    step = epoch_steps(config(), [f"p{i}" for i in range(8)])[0]
    return installation(RunSettings(config(), 1, "/tmp/run", "run"), step, 0)


@pytest.fixture
def server(tmp_path):
    from verl_integration.server import ElasticHttpServer

    made = object.__new__(ElasticHttpServer)
    made.replica_rank, made._section = 0, config()
    made._run = RunSettings(config(), 1, str(tmp_path), "run")
    made._door = made._open = made._lost = made._ended = None
    made._entered, made._generated_at, made._losses = 0, 0.0, []
    made._board = Board(tmp_path / "board", WORLD)
    made.engine = made._engines = Engines(made._board)
    made._watchdog = Watchdog()
    made._engines.show(-1)
    return made


def test_a_step_is_installed_and_ends_when_every_rank_has_left_it(server, order):
    async def run():
        assert await server.flexfloor_begin(order) is None
        server._entered = sum(order["expected"])
        ending = asyncio.create_task(server.flexfloor_end())
        await asyncio.sleep(0.05)
        assert not ending.done()
        server._engines.show(-1)
        return await asyncio.wait_for(ending, 5)

    report = asyncio.run(run())
    assert isinstance(report, StepReport)
    assert report.generated_at <= report.ended_at
    assert server._engines.calls[:2] == [("reset_prefix_cache",), ("install", order["digest"])]


def test_what_goes_wrong_with_a_plan_is_one_line(server, order):
    server._engines.refusal = "EP size 3 does not divide 16 experts"
    assert asyncio.run(server.flexfloor_begin(order)).startswith("rank 2 refused step 0: EP size 3")
    server._engines.refusal, server._engines.digest = None, "another"
    assert "acknowledged another plan" in asyncio.run(server.flexfloor_begin(order))


def test_a_second_step_waits_for_the_end_of_the_first(server, order):
    async def run():
        await server.flexfloor_begin(order)
        return await server.flexfloor_begin(order)

    assert asyncio.run(run()) == "step 0 is still open"


def test_a_lost_response_is_taken_out_of_its_ranks_count_once(server, order):
    async def run():
        await server.flexfloor_begin(order)
        for _ in range(2):
            await server.flexfloor_lost(3, 1, "p1:0: ValueError: no reward")
        assert server._door.passed(3)
        server._entered = 1
        server._engines.show(-1)
        return await server.flexfloor_end()

    report = asyncio.run(run())
    assert [call for call in server._engines.calls if call[0] == "revise"] == [("revise", {"delta": -1}, 1)]
    assert report.lost[0] == "p1:0: ValueError: no reward"


def test_a_step_that_nobody_entered_is_withdrawn(server, order):
    async def run():
        await server.flexfloor_begin(order)
        for place in range(sum(order["expected"])):
            await server.flexfloor_lost(place, 0, "down")
        return await asyncio.wait_for(server.flexfloor_end(), 5)

    assert isinstance(asyncio.run(run()), StepReport)
    assert ("withdraw", {}) in server._engines.calls


def test_a_lost_engine_ends_the_step_with_rank_and_phase(server, order):
    async def run():
        await server.flexfloor_begin(order)
        server._note_loss(EngineLostError(2, "step", "its process was killed by SIGKILL"))
        return await server.flexfloor_end(), await server.flexfloor_health(), await server.flexfloor_begin(order)

    line = "rank 2 lost in phase 'step': its process was killed by SIGKILL"
    assert asyncio.run(run()) == (line, [line], line)


def test_the_end_without_a_step_is_nothing(server):
    assert isinstance(asyncio.run(server.flexfloor_end()), StepReport)


def test_a_late_turn_goes_to_a_member_while_its_rank_is_parked(server):
    turn = Turn("p0:0", 1, None, True)
    assert server._route(turn) == 1
    server._board.write(1, Status(RankState.PARKED, Phase.IDLE, 2, 1, 0, 0, beat(), 1))
    assert server._route(turn) == 0
