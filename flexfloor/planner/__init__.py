"""The planner: turns length history into steps, caps, groups and ladders. numpy and PuLP only."""

from flexfloor.planner.epoch import plan_epoch

__all__ = ["plan_epoch"]
