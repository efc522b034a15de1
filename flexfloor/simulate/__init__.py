"""Discrete-event simulation of rollouts: what a plan will gain, from lengths and step times, on no accelerator at all.

workload   true lengths by epoch        costs      what things cost
batching   one rank's iterations        lockstep   the ranks' iterations together
world      one step: decisions, transitions, events (records: what goes in and out)
run        epochs, plans, the log
compare, sweep, page, calibrate (fitting)          what the command does with runs
"""

from flexfloor.simulate.batching import Limits, Request, run_rank
from flexfloor.simulate.costs import Costs, default_costs, h200_table, load_costs
from flexfloor.simulate.records import StepInput, StepOutcome
from flexfloor.simulate.run import Machine, SimulatedRun, simulate_workloads
from flexfloor.simulate.workload import Workload, drawn, from_observations, read_distribution
from flexfloor.simulate.world import simulate_step

__all__ = [
    "Costs",
    "Limits",
    "Machine",
    "Request",
    "SimulatedRun",
    "StepInput",
    "StepOutcome",
    "Workload",
    "default_costs",
    "drawn",
    "from_observations",
    "h200_table",
    "load_costs",
    "read_distribution",
    "run_rank",
    "simulate_step",
    "simulate_workloads",
]
