import dataclasses

import journal

from vllm_ascend.compilation import acl_graph


class AclGraphSleepWakeupManager:
    @classmethod
    def clear_all_attention_workspaces(cls):
        for size in acl_graph._graph_params.workspaces:
            acl_graph._graph_params.workspaces[size] = None

    @classmethod
    def reset_all_graph_params(cls):
        journal.note("reset")
        for field in dataclasses.fields(acl_graph._graph_params):
            table = getattr(acl_graph._graph_params, field.name)
            for size, value in table.items():
                if isinstance(value, list):
                    table[size] = []
        for wrapper in list(acl_graph._acl_graph_wrappers):
            wrapper.concrete_aclgraph_entries.clear()
            wrapper.first_run_finished = False
