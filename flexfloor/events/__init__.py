"""One event, its writer and its reader: all that engine, driver, simulator and ledger share.

A log is JSON lines, append-only, one file a process, flushed at each line::

    {"t": 12.5, "res": 1e-06, "run": "r", "seed": 0, "epoch": 1, "step": 0, "rank": 3, "event": "detach_end"}

An event stamped ``t`` with resolution ``res`` happened in ``[t, t + res]`` (seconds, one clock for all processes of
a host). ``rank`` is null for the driver; ``replica`` and ``host`` may stand on every event. Further fields lie flat
beside these. Source: seed 001 section 5.2 and appendix C.
"""

from flexfloor.events.event import Event
from flexfloor.events.names import EVENT_NAMES, PARTS, EventSpec
from flexfloor.events.reader import EventLog, parse_event, read_events
from flexfloor.events.writer import EventWriter, event_file

__all__ = [
    "EVENT_NAMES",
    "PARTS",
    "Event",
    "EventLog",
    "EventSpec",
    "EventWriter",
    "event_file",
    "parse_event",
    "read_events",
]
