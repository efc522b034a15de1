"""The door: requests enter in the order of the plan, and a lost one holds nobody up."""

import asyncio
import random

import pytest

from verl_integration.door import Door


def enter(arrivals, count, lost=()):
    async def run():
        door, entered = Door(count), []

        async def come(place):
            async with door.turn(place):
                await asyncio.sleep(0)
                entered.append(place)

        tasks = []
        for place in arrivals:
            tasks.append(asyncio.create_task(come(place)))
            await asyncio.sleep(0)
        for place in lost:
            await door.lose(place)
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        return entered, door.waiting_for

    return asyncio.run(run())


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_arrival_becomes_the_planned_order(seed):
    arrivals = list(range(20))
    random.Random(seed).shuffle(arrivals)
    assert enter(arrivals, 20) == (list(range(20)), None)


def test_lost_places_are_skipped():
    assert enter([4, 2, 1], 5, lost=[3, 0]) == ([1, 2, 4], None)


def test_a_missing_place_holds_those_behind_it():
    async def run():
        door = Door(2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), door.turn(1):
                raise AssertionError("entered before its turn")
        assert door.waiting_for == 0
        await door.lose(0)
        async with door.turn(1):
            assert door.passed(0)
        assert door.waiting_for is None

    asyncio.run(run())


def test_a_request_that_fails_inside_lets_the_next_one_in():
    async def run():
        door = Door(2)
        with pytest.raises(ZeroDivisionError):
            async with door.turn(0):
                raise ZeroDivisionError
        async with asyncio.timeout(1), door.turn(1):
            pass

    asyncio.run(run())


def test_an_unknown_place_is_an_error():
    async def run():
        with pytest.raises(ValueError, match="place 2 is none of 2"):
            async with Door(2).turn(2):
                pass

    asyncio.run(run())
