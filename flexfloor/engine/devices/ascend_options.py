"""Options under which a rank on Ascend cannot leave and come back: what is refused, why, and the line to change.

Pure data and plain reads, so that the driver and `flexfloor doctor` refuse before anything starts; the device module
asks again in the worker, where vllm-ascend has resolved its configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

MISSING = object()


class Problem(NamedTuple):
    """A setting that cannot work.

    Attributes:
        what: the setting and why it cannot work.
        line: the line to change, as it should stand.
    """

    what: str
    line: str


@dataclass(frozen=True)
class Option:
    """One setting of ``additional_config``.

    Attributes:
        path: keys below ``additional_config``.
        allowed: values that work.
        why: why others do not.
        default: what vllm-ascend takes where nobody says.
        removed: the key exists in older releases only; naming it is refused.
    """

    path: tuple[str, ...]
    allowed: tuple[Any, ...]
    why: str
    default: Any = MISSING
    removed: bool = False

    @property
    def name(self) -> str:
        """The dotted name."""
        return ".".join(self.path)

    @property
    def line(self) -> str:
        """The setting as it should stand in YAML."""
        if self.removed:
            return f"remove additional_config.{self.name}"
        text = _yaml(self.allowed[0])
        for key in reversed(self.path):
            text = f"{{{key}: {text}}}"
        return f"additional_config: {text}"

    def works(self, value: Any) -> bool:
        """Whether a value is allowed."""
        return not self.removed and any(value == allowed and type(value) is type(allowed) for allowed in self.allowed)


_WORLD = "it holds groups of a fixed set of ranks"
_ROWS = "it moves or adds experts behind the plan's back"
_CORE = "it replaces the engine core whose sync point FlexFloor uses"

OPTIONS: tuple[Option, ...] = (
    Option(
        ("weight_nz_mode",),
        (0,),
        "expert rows are moved in ND layout, and waking refuses FRACTAL_NZ weights",
        default=1,
    ),
    Option(("enable_fused_mc2",), (0,), "fused MC2 keeps NZ weights and buffers sized by the EP world"),
    Option(("enable_prefill_mc2",), (False,), "prefill batches exceed what the MC2 operator takes"),
    Option(("mc2_comm_alg",), ("",), "only the default MC2 algorithm was read against the operator's limits"),
    Option(("enable_mc2_hierarchy_comm",), (False,), "only the default MC2 algorithm was read"),
    Option(("eplb_config", "dynamic_eplb"), (False,), _ROWS),
    Option(("eplb_config", "expert_map_path"), (None,), _ROWS),
    Option(("eplb_config", "expert_map_record_path"), (None,), _ROWS),
    Option(("eplb_config", "num_redundant_experts"), (0,), _ROWS),
    Option(("enable_force_eplb",), (False,), _ROWS),
    Option(("mix_placement",), (False,), _ROWS),
    Option(
        ("rl_config", "sleep_mode_extra_cleanup"),
        (False,),
        "it destroys every HCCL group when one rank sleeps, and waking is a collective",
    ),
    Option(("enable_sleep_mode_extra_cleanup",), (False,), "it destroys every HCCL group", removed=True),
    Option(("finegrained_tp_config", "oproj_tensor_parallel_size"), (0,), _WORLD),
    Option(("finegrained_tp_config", "lmhead_tensor_parallel_size"), (0,), _WORLD),
    Option(("finegrained_tp_config", "embedding_tensor_parallel_size"), (0,), _WORLD),
    Option(("finegrained_tp_config", "mlp_tensor_parallel_size"), (0,), _WORLD),
    Option(("layer_sharding",), (None,), _WORLD, removed=True),
    Option(("multistream_overlap_gate",), (False,), _WORLD, removed=True),
    Option(("scheduler_config", "enable_balance_scheduling"), (False,), _CORE),
    Option(("scheduler_config", "dyntra_lb_config", "enabled"), (False,), _CORE),
    Option(
        ("scheduler_config", "recompute_scheduler_enable"),
        (False,),
        "it skips the DP all-reduce that FlexFloor resizes",
    ),
    Option(("scheduler_config", "profiling_chunk_config", "enabled"), (False,), "it needs pipeline parallelism"),
    Option(("enable_balance_scheduling",), (False,), _CORE, removed=True),
    Option(("xlite_graph_config", "enabled"), (False,), "its runner is another one"),
    Option(("ascend_compilation_config", "enable_static_kernel"), (False,), "static kernels are built for one world"),
    Option(("ascend_compilation_config", "enable_super_kernel"), (False,), "super kernels are built for one world"),
)


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: the variable.
        bad: whether a value (None: unset) cannot work.
        why: why.
        line: the line to change.
    """

    name: str
    bad: Callable[[str | None], bool]
    why: str
    line: str


def _on(value: str | None) -> bool:
    return value is not None and value.strip().lower() in ("1", "true", "yes", "on")


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "TASK_QUEUE_ENABLE",
        lambda v: v not in (None, "1"),
        "graph capture needs task queue 1 (2 is rejected during capture)",
        "export TASK_QUEUE_ENABLE=1",
    ),
    Variable(
        "VLLM_USE_V2_MODEL_RUNNER", _on, "vLLM's V2 model runner cannot shrink", "export VLLM_USE_V2_MODEL_RUNNER=0"
    ),
    Variable(
        "VLLM_USE_BREAKABLE_CUDAGRAPH", _on, "breakable graphs are kept elsewhere", "unset VLLM_USE_BREAKABLE_CUDAGRAPH"
    ),
    Variable(
        "ASCEND_LAUNCH_BLOCKING", _on, "graphs cannot be captured in blocking mode", "unset ASCEND_LAUNCH_BLOCKING"
    ),
    Variable(
        "PYTORCH_NPU_ALLOC_CONF",
        lambda v: "expandable_segments:true" in (v or "").lower().replace(" ", ""),
        "expandable segments are not compatible with the sleep pool",
        "unset PYTORCH_NPU_ALLOC_CONF",
    ),
    Variable("DYNAMIC_EPLB", _on, _ROWS, "unset DYNAMIC_EPLB"),
    Variable("EXPERT_MAP_RECORD", _on, _ROWS, "unset EXPERT_MAP_RECORD"),
    Variable(
        "VLLM_ASCEND_ENABLE_FLASHCOMM1",
        _on,
        "sequence parallelism needs TP above 1",
        "unset VLLM_ASCEND_ENABLE_FLASHCOMM1",
    ),
)

ENGINE: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
    ("enable_sleep_mode", (True,), "a leaving rank gives memory back by sleeping", "enable_sleep_mode: true"),
    ("quantization", (MISSING, None), "W8A8 experts lie in FRACTAL_NZ layout", "remove quantization (BF16 weights)"),
    ("enable_eplb", (MISSING, None, False), _ROWS, "remove enable_eplb"),
    ("async_scheduling", (MISSING, None, False), "batches in flight across a transition were not read", "remove it"),
    ("enable_return_routed_experts", (MISSING, None, False), "it keeps the first world's DP rank", "remove it"),
)
"""Engine arguments: name, values that work, why others do not, the line to change."""

GRAPH_MODES = ("NONE", "FULL_DECODE_ONLY")


def engine_problems(arguments: Mapping[str, Any], *, eager: bool = False) -> Iterator[Problem]:
    """Problems of ``engine.vllm`` as the configuration says it."""
    for name, works, why, line in ENGINE:
        value = arguments.get(name, MISSING)
        if not any(value is allowed or value == allowed for allowed in works):
            said = "is missing" if value is MISSING else f"is {value!r}"
            yield Problem(f"engine.vllm.{name} {said}: {why}", f"engine.vllm: {line}")
    yield from _graph_problems(arguments, eager=eager)
    extra = arguments.get("additional_config") or {}
    if not isinstance(extra, Mapping):
        yield Problem("engine.vllm.additional_config is no mapping", "additional_config: {weight_nz_mode: 0}")
        return
    off = _at(extra, ("rl_config", "enabled")) is True
    for option in OPTIONS:
        value = _at(extra, option.path)
        if value is MISSING:
            value = option.default
        if value is MISSING or option.works(value) or (option.path == ("weight_nz_mode",) and off):
            continue
        yield Problem(f"additional_config.{option.name} is {value!r}: {option.why}", f"engine.vllm: {option.line}")


def _graph_problems(arguments: Mapping[str, Any], *, eager: bool) -> Iterator[Problem]:
    if eager or arguments.get("enforce_eager"):
        return
    compilation = arguments.get("compilation_config") or {}
    mode = compilation.get("cudagraph_mode", MISSING) if isinstance(compilation, Mapping) else MISSING
    if mode not in GRAPH_MODES:
        said = "is missing" if mode is MISSING else f"is {mode!r}"
        yield Problem(
            f"engine.vllm.compilation_config.cudagraph_mode {said}: other graph modes were not read",
            "engine.vllm: compilation_config: {cudagraph_mode: FULL_DECODE_ONLY, cudagraph_capture_sizes: [..]}",
        )


def variable_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Problems of the environment."""
    for variable in VARIABLES:
        value = environment.get(variable.name)
        if variable.bad(value):
            yield Problem(f"{variable.name} is {value!r}: {variable.why}", variable.line)


def live_problems(ascend_config: Any) -> Iterator[Problem]:
    """Problems of vllm-ascend's resolved configuration object.

    A removed option is not looked for. One that this release has no attribute for is a problem of its own: the
    contract with the release is broken.
    """
    for option in OPTIONS:
        if option.removed:
            continue
        value = ascend_config
        for key in option.path:
            value = getattr(value, key, MISSING)
        if value is MISSING:
            yield Problem(f"vllm-ascend has no option {option.name}", "install a tested release of vllm-ascend")
        elif not option.works(value):
            yield Problem(f"additional_config.{option.name} is {value!r}: {option.why}", f"engine.vllm: {option.line}")


def _at(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = tree
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return MISSING
        value = value[key]
    return value


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)
