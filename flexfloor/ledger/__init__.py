"""Occupied rank-time from event logs: how much of the ranks' time a rollout used, and what it generated with it."""

from flexfloor.ledger.aggregate import Gains, SeedTotals, Totals, compare
from flexfloor.ledger.bounds import Bounds
from flexfloor.ledger.records import kept_tokens
from flexfloor.ledger.report import report_json
from flexfloor.ledger.run import RunLedger, account, load_run

__all__ = [
    "Bounds",
    "Gains",
    "RunLedger",
    "SeedTotals",
    "Totals",
    "account",
    "compare",
    "kept_tokens",
    "load_run",
    "report_json",
]
