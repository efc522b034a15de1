"""plan.json: what is written is read back, and what contradicts itself is refused with file and field."""

import json

import pytest

from flexfloor.errors import InputError
from flexfloor.plan import EpochPlan, RankPlan, StepPlan


def example():
    ranks = (
        RankPlan(rank=0, items=("b",), completion=1, peak_tokens=4),
        RankPlan(rank=1, items=("a", "a"), completion=2.5, peak_tokens=9),
        RankPlan(rank=2, items=(), completion=0, peak_tokens=0),
    )
    step = StepPlan(
        step=0,
        items=("a", "b", "a"),
        cap=None,
        tail=2.5,
        floor=1,
        ladder=(3, 1),
        quorum_times=(1,),
        release_area=3.0,
        residency="natural",
        kv_tokens_per_rank=20,
        capture_sizes=(1, 4),
        kv_safe=True,
        optimality_gap=0.0,
        excluded_floors={"2": "no capacity"},
        ranks=ranks,
    )
    return EpochPlan(epoch=3, world_size=3, method="flex", config_digest="d", steps=(step,), swaps=((0, "x", "y"),))


def test_round_trip_and_digest(tmp_path):
    plan = example()
    plan.save(tmp_path / "plan.json")
    again = EpochPlan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.steps[0].digest == plan.steps[0].digest
    assert len(plan.steps[0].digest) == 64
    other = plan.steps[0].model_copy(update={"cap": 7})
    assert other.digest != plan.steps[0].digest
    assert "notes" not in plan.to_json()["steps"][0]
    noted = plan.steps[0].model_copy(update={"notes": ("said",)})
    assert noted.model_dump(mode="json")["notes"] == ["said"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ladder": [3, 3]}, "steps.0.ladder"),
        ({"ladder": [1, 3], "floor": 3}, "steps.0.ladder"),
        ({"ladder": [4, 1]}, "steps.0.ranks"),
        ({"floor": 3}, "steps.0.floor"),
        ({"quorum_times": []}, "steps.0.quorum_times"),
        ({"quorum_times": [0.5]}, "steps.0.quorum_times"),
        ({"release_area": 4.0}, "steps.0.release_area"),
        ({"tail": 3}, "steps.0.tail"),
        ({"items": ["a", "b"]}, "steps.0.ranks"),
        ({"items": ["a", "b", "c"]}, "steps.0.ranks"),
        ({"capture_sizes": [4, 1]}, "steps.0.capture_sizes"),
        ({"cap": 0}, "steps.0.cap"),
        ({"cap": "7"}, "steps.0.cap"),
        ({"residency": "lazy"}, "steps.0.residency"),
        ({"step": 1}, "steps.0.step"),
        ({"comment": "x"}, "steps.0.comment: unknown field"),
        ({"tail": None}, "steps.0.tail"),
    ],
)
def test_contradictions_are_refused(tmp_path, change, field):
    data = example().to_json()
    data["steps"][0].update(change)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(InputError) as caught:
        EpochPlan.load(tmp_path / "plan.json")
    assert str(caught.value).startswith(f"{tmp_path / 'plan.json'}: {field}"), caught.value
    assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "broken").write_text('{"schema":\n nothing}')
    with pytest.raises(InputError, match="broken:2: is no JSON"):
        EpochPlan.load(tmp_path / "broken")
    with pytest.raises(InputError, match="cannot be read"):
        EpochPlan.load(tmp_path / "none")
    data = example().to_json()
    (tmp_path / "future").write_text(json.dumps({**data, "schema": "flexfloor.plan/2"}))
    with pytest.raises(InputError, match="schema"):
        EpochPlan.load(tmp_path / "future")
    (tmp_path / "less").write_text(json.dumps({k: v for k, v in data.items() if k != "epoch"}))
    with pytest.raises(InputError, match="epoch: is missing"):
        EpochPlan.load(tmp_path / "less")
