"""History: EMA, transactions, resume, censoring, files (planner.md section 2)."""

import json
import sqlite3
import subprocess
import sys

import pytest

from flexfloor.errors import InputError
from flexfloor.history import HistoryStore, Observation, read_lengths, replay, resample, write_lengths


def seen(item, epoch, *lengths, censored=()):
    return Observation(item, epoch, 7, lengths, censored)


def test_ema_weighs_the_newest_observation_most():
    history = replay([seen("a", 0, 100, 3), seen("a", 1, 200), seen("a", 3, 50), seen("b", 1, 8)], alpha=0.3)
    after_1 = 0.3 * 100 + 0.7 * 200
    assert history.items["a"].ema_tail == pytest.approx(0.3 * after_1 + 0.7 * 50)
    assert history.items["b"].ema_tail == 8
    assert history.ratio_pairs == {1: [(200, 100.0)], 3: [(50, pytest.approx(after_1))]}
    assert history.next_epoch == 4
    assert history.items["a"].latest.lengths == (50,)


def test_file_order_sets_item_order_and_epochs_set_time():
    history = replay([seen("z", 1, 9), seen("a", 0, 5), seen("z", 0, 3)], alpha=0.0)
    assert list(history.items) == ["z", "a"]
    assert history.items["z"].ema_tail == 9


def test_resample_takes_the_kth_longest():
    assert resample([1, 5, 3, 9], 2) == [9, 3]
    assert resample([4, 7], 4) == [7, 7, 4, 4]
    assert resample([4, 7, 1], 3) == [7, 4, 1]
    assert resample([5, 3, 1], 2) == [5, 3]


def test_store_keeps_steps_and_resumes_as_of_a_checkpoint(tmp_path):
    with HistoryStore(tmp_path / "sub" / "history.sqlite") as store:
        store.record_step(1, 0, [seen("a", 0, 10), seen("b", 0, 20, 25, censored=(1,))])
        store.record_step(2, 0, [seen("a", 0, 40)])
        store.record_step(5, 1, [seen("a", 1, 100)])
        assert store.last_step == 5
    with HistoryStore(tmp_path / "sub" / "history.sqlite") as store:
        assert store.view(0.5, as_of=0).items == {}
        assert store.view(0.5, as_of=1).items["a"].ema_tail == 10
        assert store.view(0.5, as_of=2).items["a"].latest.lengths == (10, 40), "one multiset an item and epoch"
        assert store.view(0.5, as_of=4) == store.view(0.5, as_of=2)
        assert store.view(0.5).items["a"].ema_tail == 70
        assert store.view(0.5).censored_responses == 1
        known = store.view(0.5, as_of=2)
        assert store.rewind(2) == 1
        assert store.view(0.5) == known
        store.record_step(3, 1, [seen("a", 1, 4)])
        assert store.view(0.5).items["a"].ema_tail == 22


def test_a_step_is_stored_whole_or_not_at_all(tmp_path):
    def failing():
        yield seen("a", 1, 5)
        raise RuntimeError("generation died")

    with HistoryStore(tmp_path / "h.sqlite") as store:
        store.record_step(1, 0, [seen("a", 0, 10)])
        before = store.view(0.3)
        with pytest.raises(RuntimeError):
            store.record_step(2, 1, failing())
        with pytest.raises(InputError, match="cannot follow"):
            store.record_step(1, 1, [seen("a", 1, 5)])
        with pytest.raises(InputError, match="epoch"):
            store.record_step(2, 1, [seen("a", 0, 5)])
        with pytest.raises(InputError, match="no responses"):
            store.record_step(2, 1, [seen("a", 1)])
        assert store.view(0.3) == before


def test_a_process_killed_inside_a_transaction_leaves_the_last_finished_step(tmp_path):
    path = tmp_path / "h.sqlite"
    with HistoryStore(path) as store:
        store.record_step(1, 0, [seen("a", 0, 10)])
        before = store.view(0.3)
    code = (
        "import os, sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "db.execute('BEGIN IMMEDIATE');"
        "db.execute('INSERT INTO steps VALUES (2, 1)');"
        "db.execute(\"INSERT INTO observations VALUES (NULL, 2, 'a', 1, 7, '[99]', '[]')\"); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -9
    with HistoryStore(path) as store:
        assert store.last_step == 1
        assert store.view(0.3) == before
        store.record_step(2, 1, [seen("a", 1, 5)])


def test_files_that_are_no_history_are_refused(tmp_path):
    (tmp_path / "text").write_text("nothing of the kind, and long enough to be no empty database at all")
    with pytest.raises(InputError, match="no usable history"):
        HistoryStore(tmp_path / "text")
    other = tmp_path / "future.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(InputError, match="format 99"):
        HistoryStore(other)


@pytest.mark.parametrize("field", ["epoch", "prompt_tokens", "lengths"])
def test_numbers_that_no_rollout_has_are_refused(tmp_path, field):
    line = {"item_id": "a", "epoch": 0, "prompt_tokens": 12, "lengths": [21]}
    line[field] = [10**26] if field == "lengths" else 10**26
    (tmp_path / "lengths.jsonl").write_text(json.dumps(line))
    with pytest.raises(InputError, match=f"lengths.jsonl:1.*{field}"):
        read_lengths(tmp_path / "lengths.jsonl")


def test_lengths_file_round_trip(tmp_path):
    kept = [seen("a", 0, 10, 12, censored=(0,)), seen("ü\n", 0, 3), seen("a", 1, 4)]
    write_lengths(tmp_path / "lengths.jsonl", kept)
    assert read_lengths(tmp_path / "lengths.jsonl") == kept
    with HistoryStore(tmp_path / "h.sqlite") as store:
        store.import_observations(0, kept)
        assert sorted(store.observations(), key=str) == sorted(kept, key=str)
        assert store.view(0.3).items == replay(kept, 0.3).items


def test_quantile_of_known_tails():
    history = replay([seen(f"i{k}", 0, k) for k in range(1, 12)], 0.3)
    assert history.quantile_tail(0.9) == 10
    assert history.quantile_tail(1.0) == 11
    assert replay([], 0.3).quantile_tail(0.5) is None
