"""The planner and what it stands on import no torch, ray, vllm or verl (issue 2, line 3)."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "vllm", "verl", "transformers")
MODULES = ["plan", "config", "history", "planner", "planner.epoch", "planner.repair", "cli.main", "cli.plan"]


@pytest.mark.parametrize("module", MODULES)
def test_imports_nothing_heavy(module):
    code = (
        f"import sys, flexfloor.{module}; "
        f"found = sorted(m for m in sys.modules if m.split('.')[0] in {HEAVY}); sys.exit(', '.join(found) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_plan_command_imports_nothing_heavy(tmp_path):
    code = (
        "import sys; from flexfloor.cli.main import run; code = run(['plan', '--help']); "
        f"found = [m for m in sys.modules if m.split('.')[0] in {HEAVY}]; sys.exit(code or ', '.join(found) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
