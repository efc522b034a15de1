import dataclasses
import weakref

import journal
from vllm.config import CUDAGraphMode

_acl_graph_wrappers = weakref.WeakSet()


@dataclasses.dataclass
class GraphParams:
    events: dict
    workspaces: dict
    handles: dict
    attn_params: dict


_graph_params = None


def set_graph_params(aclgraph_capture_sizes):
    global _graph_params
    if _graph_params is not None:
        raise ValueError("Graph parameters have already been set!")
    lists = [{size: [] for size in aclgraph_capture_sizes} for _ in range(3)]
    _graph_params = GraphParams(lists[0], dict.fromkeys(aclgraph_capture_sizes), *lists[1:])


def get_graph_params():
    return _graph_params


class ACLGraphWrapper:
    def __init__(self, runnable, vllm_config, runtime_mode, cudagraph_options=None):
        self.runnable, self.runtime_mode = runnable, runtime_mode
        self.concrete_aclgraph_entries, self.first_run_finished = {}, False
        _acl_graph_wrappers.add(self)

    def __getattr__(self, key):
        return getattr(self.runnable, key)

    def unwrap(self):
        return self.runnable

    def __call__(self, *args, **kwargs):
        """args: batch descriptor, mode, whether capturing is on."""
        key, mode, capturing = args
        if mode is CUDAGraphMode.NONE:
            return self.runnable(key)
        params = get_graph_params()
        if key not in self.concrete_aclgraph_entries:
            if not capturing:
                journal.breaks("eager-or-captured", f"a graph of {key.num_tokens} would be captured while serving")
            if params.handles[key.num_tokens]:
                journal.breaks("reset-before-capture", f"batch {key.num_tokens} has handles of an earlier graph")
            handle = object()
            params.handles[key.num_tokens].append(handle)
            params.attn_params[key.num_tokens].append((handle,))
            self.concrete_aclgraph_entries[key] = handle
            return self.runnable(key)
        if params.handles[key.num_tokens] != [self.concrete_aclgraph_entries[key]]:
            journal.breaks("graphs-and-parameters", f"batch {key.num_tokens} replays with parameters of another graph")
        journal.note("replay", key.num_tokens)
        return self.runnable(key)
