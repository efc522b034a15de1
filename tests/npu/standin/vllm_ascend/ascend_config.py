import types

from flexfloor.engine.devices.ascend_options import OPTIONS


def _tree():
    tree = types.SimpleNamespace(get_mc2_comm_alg=lambda: "", combine_quant_mode=0)
    for option in OPTIONS:
        if option.removed:
            continue
        at = tree
        for key in option.path[:-1]:
            at.__dict__.setdefault(key, types.SimpleNamespace())
            at = at.__dict__[key]
        at.__dict__[option.path[-1]] = option.allowed[0]
    tree.rl_config.enabled = False
    return tree


config = _tree()


def get_ascend_config():
    return config


def is_mega_moe_supported():
    return False
