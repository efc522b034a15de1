"""Pages that show commands show what they print."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool():
    spec = importlib.util.spec_from_file_location("docs_commands", ROOT / "tools" / "docs_commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["choosing_floors.md"])
def test_the_output_on_the_page_is_what_the_commands_print(page):
    if shutil.which("bash") is None or not (Path(sys.executable).parent / "flexfloor").exists():
        pytest.skip("needs bash and an installed flexfloor command")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert tool().rendered(text).splitlines() == text.splitlines()


def test_output_replaces_what_stood_there_and_a_failing_command_stops():
    page = "a\n```console\n$ echo one \\\n    two\nold\n$ true\nold\n```\nb\n```text\n$ echo no\n```\n"
    done = "a\n```console\n$ echo one \\\n    two\none two\n$ true\n```\nb\n```text\n$ echo no\n```\n"
    assert tool().rendered(page) == done
    with pytest.raises(SystemExit, match="exit 3"):
        tool().rendered("```console\n$ exit 3\n```\n")
