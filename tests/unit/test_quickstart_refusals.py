"""The quickstart's configuration for devices, where there are none: refused before anything starts."""

import os
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"


def test_the_configuration_for_devices_is_refused_without_them(tmp_path):
    none = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
    config, out = RECIPES / "quickstart_cuda.yaml", tmp_path / "out"
    command = [sys.executable, str(RECIPES / "quickstart.py"), "--config", str(config), "--out", str(out)]
    ended = subprocess.run(command, env={**os.environ, **none}, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("quickstart: ")
    assert ";" in line, "a remedy follows"
    assert not out.exists()
