"""Length history: observations, the predictions replayed from them, and their store."""

from flexfloor.history.lengths_file import read_lengths, write_lengths
from flexfloor.history.records import ItemHistory, LengthHistory, Observation, replay, resample
from flexfloor.history.store import HistoryStore

__all__ = [
    "HistoryStore",
    "ItemHistory",
    "LengthHistory",
    "Observation",
    "read_lengths",
    "replay",
    "resample",
    "write_lengths",
]
