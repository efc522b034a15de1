"""What a machine lacks for running FlexFloor: packages, versions, devices, options, ports, shared memory."""

from flexfloor.doctor.checks import Request, inspect
from flexfloor.doctor.finding import Finding, State
from flexfloor.doctor.machine import Machine

__all__ = ["Finding", "Machine", "Request", "State", "inspect"]
