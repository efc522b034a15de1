from decimal import Decimal

import pytest
import yaml
from simulate_runs import SETTINGS, TABLE, config, simulated, workload

from flexfloor.errors import InputError
from flexfloor.events import EventLog, read_events
from flexfloor.history import Observation, read_lengths
from flexfloor.ledger import account, load_run
from flexfloor.ledger.charts import length_histogram
from flexfloor.ledger.html import page as ledger_page
from flexfloor.simulate import Machine, drawn, from_observations, simulate_workloads
from flexfloor.simulate.compare import method_variants, presets_in, simulate_arms
from flexfloor.simulate.costs import (
    FREE,
    H200,
    default_costs,
    load_costs,
    save_costs,
)
from flexfloor.simulate.page import page
from flexfloor.simulate.sweep import parse_sweep, run_sweep, vary
from flexfloor.simulate.workload import Distribution, mixture, read_distribution

np = pytest.importorskip("numpy")


def test_work_is_conserved_and_every_check_of_the_ledger_passes():
    run, truth = simulated(), workload()
    ledger = run.ledger()
    assert ledger.problems == ()
    expected = 0
    for (seed, epoch), plan in run.plans.items():
        assert seed == 0
        caps = {item: min(step.cap or 90, 90) for step in plan.steps for item in step.items}
        expected += sum(min(n, caps[i]) for i, own in truth.epochs[epoch].lengths.items() for n in own)
    assert ledger.totals.response_tokens == expected
    assert sum(seed.responses for seed in ledger.totals.seeds) == 2 * 16 * 2
    assert ledger.totals.occupied.hi <= 4 * ledger.totals.window_seconds


def test_the_folder_reads_back_as_the_same_account(tmp_path):
    run = simulated(name="flex")
    run.save(tmp_path / "flex")
    again, held = load_run(tmp_path / "flex"), run.ledger()
    assert again.problems == ()
    assert again.totals == held.totals
    assert again.lengths == held.lengths
    assert any("step times" in note for note in again.notes)
    assert load_costs(tmp_path / "flex" / "costs.yaml", FREE) == H200
    with pytest.raises(InputError, match="holds events already"):
        run.save(tmp_path / "flex")


def test_the_lengths_of_several_seeds_are_read_back_and_drawn(tmp_path):
    run = simulate_workloads(config(), {seed: workload(seed) for seed in (2, 10)}, Machine(TABLE, H200), name="seeds")
    run.save(tmp_path / "seeds")
    again = load_run(tmp_path / "seeds")
    assert again.problems == ()
    assert sorted(again.lengths) == sorted(run.ledger().lengths)
    assert len(again.lengths) == 2 * 2 * 16 * 2  # seeds, epochs after the bootstrap, items, responses
    shown = length_histogram(again, None)
    assert shown is not None
    assert len(shown.data[0].x) == len(again.lengths)
    assert "Response lengths" in ledger_page(again)


def test_equal_seeds_give_equal_logs_and_others_do_not():
    logs = [[event.to_json() for event in simulated().events] for _ in range(2)]
    assert logs[0] == logs[1]
    other = simulate_workloads(config(), {0: workload(seed=1)}, Machine(TABLE, H200))
    assert [event.to_json() for event in other.events] != logs[0]


def test_epochs_are_planned_from_what_was_observed_before():
    run, truth = simulated(), workload()
    first = run.plans[0, 1]
    tails = {item: max(own) for item, own in truth.epochs[0].lengths.items()}
    by_tail = sorted(tails, key=lambda item: (min(tails[item], 90), item))
    assert [item for step in first.steps for item in step.items] == by_tail
    seen = {(one.item_id, one.epoch): one for one in run.observations[0]}
    assert {epoch for _, epoch in seen} == {0, 1, 2}
    capped = [one for one in seen.values() if one.censored]
    assert all(max(one.lengths) <= 90 for one in seen.values())
    assert all(one.epoch == 2 for one in capped)  # no ratio, so no cap, before the second planned epoch


def test_the_bootstrap_runs_in_the_full_world():
    run = simulated(bootstrap=True)
    assert all(step.ladder == (4,) for step in run.plans[0, 0].steps)
    assert run.ledger().problems == ()
    assert [epoch for _, epoch in run.outcomes] == [0, 1, 2]


def test_a_given_plan_is_simulated_as_it_is():
    made = simulated().plans[0, 1]
    run = simulated(plan=made)
    assert run.plans == {(0, 1): made}
    strange = made.model_copy(update={"steps": (made.steps[0].model_copy(update={"items": ("x",)}),)})
    entry = made.steps[0].ranks[0].model_copy(update={"items": ("x",)})
    strange = made.model_copy(update={"steps": (made.steps[0].model_copy(update={"ranks": (entry,)}),)})
    with pytest.raises(InputError, match="item 'x' of the plan has no lengths"):
        simulated(plan=strange)


def test_one_epoch_is_its_own_future_with_or_without_error():
    seen = [Observation(f"i{i}", 3, 5, (10 + i, 20)) for i in range(4)]
    exact, noisy = from_observations(seen), from_observations(seen, noise=0.5, seed=1)
    assert exact.epochs[1].lengths == exact.epochs[0].lengths
    assert "without any error" in exact.notes[0]
    assert noisy.epochs[1].lengths != noisy.epochs[0].lengths
    assert noisy == from_observations(seen, noise=0.5, seed=1)


def test_drawn_lengths_follow_the_distribution_and_the_correlation():
    many = workload(items=3000, epochs=1)
    first, second = (np.array([epoch.lengths[i] for i in epoch.items], dtype=float) for epoch in many.epochs)
    assert first.mean() == pytest.approx(52.5, rel=0.03)
    inside, across = (np.corrcoef(a, b)[0, 1] for a, b in ((first[:, 0], first[:, 1]), (first[:, 0], second[:, 1])))
    # Uniform lengths: a normal-score correlation c gives a linear one of 6/pi * asin(c/2) = 0.582 for c = 0.6.
    assert inside == pytest.approx(0.582, abs=0.04)
    assert across == pytest.approx(0.582, abs=0.04)
    none = workload(items=3000, epochs=1, correlation=0.0).epochs[0]
    flat = np.array([none.lengths[i] for i in none.items], dtype=float)
    assert abs(np.corrcoef(flat[:, 0], flat[:, 1])[0, 1]) < 0.05


def test_a_mixture_weighs_its_parts():
    low, high = (Distribution(np.array([n]), np.array([1.0])) for n in (10, 20))
    mixed = mixture([(low, 1.0), (high, 3.0)])
    assert mixed.tokens.tolist() == [10, 20]
    assert mixed.cumulative.tolist() == [0.25, 1.0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("output_tokens,probability\n5,x\n", "p.csv:2: probability: must be a number"),
        ("output_tokens,probability\n0,1\n", "p.csv:2: output_tokens: must be a whole number"),
        ("output_tokens,probability\n5,1,1\n", "p.csv:2: has 3 cells"),
        ("output_tokens,probability\n5,0\n", "p.csv: probability: sum to 0"),
        ("tokens,p\n5,1\n", "p.csv:1: needs the columns"),
        ("", "p.csv: needs the columns"),
    ],
)
def test_a_malformed_distribution_is_refused(tmp_path, text, told):
    (tmp_path / "p.csv").write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_distribution(tmp_path / "p.csv")
    assert told in str(caught.value)


def test_a_comparison_has_the_baseline_first_and_gains_of_means():
    found = simulate_arms(
        method_variants(config()), lambda _: {s: workload(s) for s in (0, 1)}, lambda _: Machine(TABLE, H200)
    )
    assert [arm.name for arm in found.arms] == ["verl", "lengthsort", "ls_tg", "fixed", "minskew", "flex"]
    base, flex = (found.arms[i].to_json() for i in (0, -1))
    assert base["throughput_gain"] is None
    assert flex["throughput_gain"] == pytest.approx(flex["throughput"] / base["throughput"] - 1)
    assert flex["mean_occupied_ranks"][1] < 4
    assert all(not arm.ledger.problems for arm in found.arms)
    assert "https://" not in page(found, [], "", found.notes).replace("https://plotly.com", "").split("</script>")[-1]


def test_presets_of_another_world_are_left_out_and_named(tmp_path):
    for name, size in (("a", 4), ("b", 4), ("c", 2)):
        data = {**SETTINGS, "world_size": size, "floors": {}, "kv": {}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"flexfloor": data}), encoding="utf-8")
    found, notes = presets_in(tmp_path)
    assert list(found) == ["a", "b"]
    assert "c (2 ranks)" in notes[0]


@pytest.mark.parametrize(("text", "values"), [("mu=1.3,1", [1, Decimal("1.3")]), ("floors", [1, 2, 4]), ("n=4", [4])])
def test_sweeps_are_read(text, values):
    assert list(parse_sweep(text, config()).values) == values


@pytest.mark.parametrize("text", ["size=3", "n=1.5", "mu=0.5", "ranks=x", "floors=", "n=nan"])
def test_odd_sweeps_are_refused(text):
    if text == "floors=":
        assert parse_sweep(text, config()).values == (1, 2, 4)
        return
    with pytest.raises(InputError, match="--sweep"):
        parse_sweep(text, config())


def test_a_sweep_varies_one_setting():
    assert vary(config(), "floors", Decimal(2))[0].floors.natural == (2, 4)
    larger, notes = vary(config(), "ranks", Decimal(8))
    assert (larger.world_size, larger.step_prompts, larger.admissible_sizes) == (8, 16, (8, 4, 2, 1))
    assert larger.capacity[8] == 400
    assert "EP 8: KV budget assumed" in notes[0]
    with pytest.raises(InputError, match="not admissible"):
        vary(config(), "floors", Decimal(3))
    swept = run_sweep(
        parse_sweep("floors=1,4", config()), config(), lambda _: {0: workload()}, lambda _: Machine(TABLE, H200)
    )
    flex = [point.arms[-1].to_json()["mean_occupied_ranks"][1] for point in swept.points]
    assert flex[0] < flex[1] == pytest.approx(4)
    assert "Throughput Q against verl" in page(None, [swept], "", ["an assumption"])


def test_costs_come_from_a_file_and_name_what_is_wrong(tmp_path):
    path = tmp_path / "costs.yaml"
    path.write_text("costs:\n  sleep_s: 1.5\n  natural:\n    shrink: {agree: 16.0}\n", encoding="utf-8")
    read = load_costs(path)
    assert (read.sleep_s, read.natural.shrink.agree, read.restore_s) == (1.5, 16.0, H200.restore_s)
    for text, told in (
        ("costs:\n  sleep_s: -1\n", "costs.yaml:2: costs.sleep_s: "),
        ("costs:\n  natural:\n    shrink:\n      agre: 1.0\n", "costs.yaml:4: costs.natural.shrink.agre: unknown key"),
        ("cost: 3\n", "costs.yaml: has no `costs:` section"),
        ("costs: [\n", "costs.yaml:"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError) as caught:
            load_costs(path)
        assert told in str(caught.value)
    save_costs(H200, path)
    assert load_costs(path, FREE) == H200
    eager = config(engine={"enforce_eager": True})
    assert not default_costs(eager).pad_to_captures


def with_captures(*sizes):
    engine = {**SETTINGS["engine"], "vllm": {"compilation_config": {"cudagraph_capture_sizes": list(sizes)}}}
    return config(engine=engine)


def test_batches_are_padded_to_the_sizes_that_the_engines_capture():
    costs = FREE.model_copy(update={"pad_to_captures": True})
    machine = Machine(TABLE, costs, False)
    seconds = [
        simulate_workloads(with_captures(*sizes), {0: workload()}, machine).ledger().totals.seeds[0].window_seconds
        for sizes in ((1, 2, 3, 4, 5, 6, 7, 8), (8,))
    ]
    assert seconds[0] < seconds[1]
    assert with_captures(8, 1, 4).engine.capture_sizes == (1, 4, 8)
    assert config().engine.capture_sizes == ()


@pytest.mark.parametrize("told", [3, "{}", [4], {"cudagraph_capture_sizes": 4}, {"cudagraph_capture_sizes": ["4"]}])
def test_capture_sizes_that_vllm_will_judge_are_left_to_it(told):
    assert config(engine={"vllm": {"compilation_config": told}}).engine.capture_sizes == ()


def test_events_in_memory_and_on_disk_are_the_same(tmp_path):
    run = simulated(name="one")
    run.save(tmp_path / "one")
    log = read_events(tmp_path / "one")
    assert [event.to_json() for event in log.events] == [event.to_json() for event in run.events]
    assert account(EventLog(log.events, [])).totals.occupied == run.ledger().totals.occupied
    assert len(read_lengths(tmp_path / "one" / "lengths.jsonl")) == 3 * 16


def test_strays_forget_their_item_and_runaways_do_not_stop():
    def lengths(**more):
        spread = Distribution(np.arange(5, 101), np.linspace(1 / 96, 1, 96))
        made = drawn(
            [(spread, 1.0)],
            items=4000,
            responses=2,
            epochs=1,
            correlation=0.9,
            prompt_tokens=6,
            seed=1,
            **more,
        )
        return np.array([made.epochs[0].lengths[i] for i in made.epochs[0].items], dtype=float), made.notes[0]

    plain, _ = lengths()
    strayed, told = lengths(strays=1.0)
    assert "100.00% of the responses drawn without regard to their item" in told
    assert strayed.mean() == pytest.approx(52.5, rel=0.03)
    assert abs(np.corrcoef(strayed.T)[0, 1]) < 0.05
    some, _ = lengths(strays=0.2)
    # Both responses of an item keep to it in 64 % of the items.
    assert np.corrcoef(some.T)[0, 1] == pytest.approx(0.64 * np.corrcoef(plain.T)[0, 1], abs=0.05)
    endless, told = lengths(runaways=0.03)
    assert "3.00% of the responses stopped by a limit only" in told
    assert (endless > 1000).mean() == pytest.approx(0.03, abs=0.006)
    assert np.array_equal(endless[endless <= 1000], plain[endless <= 1000])


def test_a_growing_spread_keeps_the_distribution_and_scatters_long_items_more():
    def lengths(**more):
        even = Distribution(np.arange(1, 1001), np.linspace(1 / 1000, 1, 1000))
        settings = {"correlation": 0.85, "prompt_tokens": 6, "seed": 3} | more
        made = drawn([(even, 1.0)], items=6000, responses=8, epochs=1, **settings)
        return np.array([made.epochs[0].lengths[i] for i in made.epochs[0].items], dtype=float), made.notes[0]

    plain, _ = lengths()
    nearly, _ = lengths(growth=1e-9)
    assert np.abs(nearly - plain).max() <= 1  # the averaged distribution function is the normal one without growth
    for growth in (1.0, 2.5):
        grown, told = lengths(growth=growth)
        assert f"spread within an item growing by exp({growth:g} u)" in told
        # Items differ, so 48,000 responses are worth some 6,000.
        assert np.quantile(grown, [0.1, 0.5, 0.9, 0.96]) == pytest.approx([100, 500, 900, 960], abs=25)
        order = np.argsort(np.median(grown, axis=1))
        within = grown.std(axis=1)[order]
        assert within[-1500:-300].mean() > 3 * within[300:1500].mean()
    evenly = plain.std(axis=1)[np.argsort(np.median(plain, axis=1))]
    assert evenly[-1500:-300].mean() == pytest.approx(evenly[300:1500].mean(), rel=0.2)
    with pytest.raises(InputError, match="growth"):
        lengths(growth=-0.1)
