import weakref
from dataclasses import dataclass

import journal
import real
import torch
import torch_npu
from vllm.config import CUDAGraphMode

NEEDED = (dataclass, torch, torch_npu)
_acl_graph_wrappers = weakref.WeakSet()
_draft_graph_params = _draft_graph_prefill_params = None
real.take("compilation/acl_graph.py", globals(), "GraphParams", "_graph_params", "set_graph_params", "get_graph_params")


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
        params = globals()["get_graph_params"]()
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
