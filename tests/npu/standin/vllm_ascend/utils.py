import torch_npu


def create_hccl_pg_options(group_name):
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"group_name": group_name}
    if "mc2" not in group_name:
        options.hccl_config["hccl_buffer_size"] = 200
    return options


def calculate_dp_buffer_size():
    return 50
