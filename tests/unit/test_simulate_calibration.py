"""What a simulated run's log, taken for a real one, gives back of the costs that made it."""

import json

import pytest
from simulate_runs import TABLE, config, simulated, workload

from flexfloor.errors import InputError
from flexfloor.events import parse_event
from flexfloor.ledger.windows import split_windows
from flexfloor.simulate import Machine, simulate_workloads
from flexfloor.simulate.calibrate import calibrate, transition_costs
from flexfloor.simulate.costs import (
    Costs,
    ResidencyCosts,
    ShrinkCosts,
)
from flexfloor.simulate.fitting import least_absolute, non_negative

np = pytest.importorskip("numpy")


def as_real(run, folder):
    """A run folder with the responses that a real rollout saves."""
    run.save(folder)
    (folder / "lengths.jsonl").write_text(
        "".join(
            json.dumps({"item_id": o.item_id, "epoch": o.epoch, "prompt_tokens": o.prompt_tokens, "lengths": o.lengths})
            + "\n"
            for o in run.observations[0]
        ),
        encoding="utf-8",
    )
    lines = []
    for (_, epoch), plan in run.plans.items():
        seen = {o.item_id: list(o.lengths) for o in run.observations[0] if o.epoch == epoch}
        for step in plan.steps:
            for entry in step.ranks:
                for item in entry.items:
                    for sample, n in enumerate(seen[item]):
                        data = {"item_id": item, "epoch": epoch, "step": step.step, "sample": sample}
                        lines.append({**data, "rank": entry.rank, "token_ids": [1] * n, "finish_reason": "stop"})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "responses.jsonl").write_text(text, encoding="utf-8")
    return folder


CALIBRATED = Costs(
    prefill_tokens_per_s=1e12,
    pad_to_captures=False,
    start_s=0.7,
    finish_s=0.2,
    sleep_s=0.01,
    wake_s=0.005,
    restore_s=0.9,
    natural=ResidencyCosts(shrink=ShrinkCosts(agree=0.01, move=0.4, capture=0.2, switch=0.1)),
)


@pytest.mark.parametrize("load", ["largest", "mean"])
def test_calibration_recovers_the_costs_of_a_run(tmp_path, load):
    folder = as_real(simulated(costs=CALIBRATED.model_copy(update={"load": load})), tmp_path / "run")
    found = calibrate(folder)
    assert found.costs.load == load
    assert found.explained == pytest.approx(1.0, rel=1e-3)
    assert found.error < 1e-3
    assert found.equations >= found.unknowns
    for knot in found.knots:
        assert knot.seconds == pytest.approx(TABLE.curve(knot.ep).seconds(knot.batch), rel=0.02), knot
    costs = found.costs
    assert costs.start_s == pytest.approx(0.7, abs=1e-3)
    assert (costs.finish_s, costs.sleep_s, costs.restore_s) == pytest.approx((0.2, 0.01, 0.9))
    assert costs.wake_s == pytest.approx(0.005)
    shrink = costs.natural.shrink
    assert shrink.agree + shrink.move + shrink.capture + shrink.switch == pytest.approx(0.71)


def test_a_calibrated_simulation_predicts_other_prompts(tmp_path):
    found = calibrate(as_real(simulated(costs=CALIBRATED), tmp_path / "run"))
    others = {0: workload(seed=5)}
    real = simulate_workloads(config(), others, Machine(TABLE, CALIBRATED)).ledger().totals
    predicted = simulate_workloads(config(), others, Machine(found.table, found.costs, True)).ledger().totals
    assert predicted.window_seconds == pytest.approx(real.window_seconds, rel=0.02)
    assert predicted.occupied.mid == pytest.approx(real.occupied.mid, rel=0.02)


def test_a_run_that_does_not_carry_enough_says_so(tmp_path):
    folder = as_real(simulated(costs=CALIBRATED), tmp_path / "run")
    responses = (folder / "responses.jsonl").read_text(encoding="utf-8")
    (folder / "responses.jsonl").unlink()
    with pytest.raises(InputError, match=r"has no responses.jsonl: without the tokens"):
        calibrate(folder)
    (folder / "responses.jsonl").write_text(responses, encoding="utf-8")
    log = folder / "events" / "simulated.jsonl"
    kept = [line for line in log.read_text(encoding="utf-8").splitlines() if '"local_complete"' not in line]
    log.write_text("\n".join(kept) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"does not carry enough to calibrate step times: .*no local_complete"):
        calibrate(folder)


def test_non_negative_least_squares_and_outliers():
    terms = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [1.0, 3.0]])
    assert non_negative(terms, terms @ [2.0, 0.5]) == pytest.approx([2.0, 0.5])
    assert non_negative(terms, terms @ [2.0, -0.5])[1] == 0
    twice = np.vstack([terms, terms])
    spoiled = twice @ np.array([2.0, 0.5])
    spoiled[4] += 100
    assert least_absolute(twice, spoiled, np.ones(10)) == pytest.approx([2.0, 0.5], abs=1e-3)


@pytest.mark.parametrize(("full", "pads"), [(9, True), (0, False)])
def test_a_calibration_pads_where_the_log_shows_replayed_graphs(full, pads):
    fields = {"t": 1.0, "res": 0.0, "run": "r", "seed": 0, "epoch": 0, "step": 0}
    log = [
        {**fields, "t": 0.0, "event": "rollout_start"},
        {**fields, "rank": 0, "event": "decode_audit", "full": full, "eager": 9 - full},
        {**fields, "t": 2.0, "event": "rollout_end", "response_tokens": 9, "world_size": 4},
    ]
    (step,) = split_windows([parse_event(line) for line in log]).steps
    assert transition_costs([step], config(), TABLE, 0.0, []).pad_to_captures is pads
