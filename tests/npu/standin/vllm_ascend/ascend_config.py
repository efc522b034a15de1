import types

from flexfloor.engine.devices.ascend_options import OPTIONS


def _tree():
    tree = types.SimpleNamespace()
    for option in OPTIONS:
        if option.removed:
            continue
        at = tree
        for key in option.path[:-1]:
            at.__dict__.setdefault(key, types.SimpleNamespace())
            at = at.__dict__[key]
        at.__dict__[option.path[-1]] = option.allowed[0]
    return tree


config = _tree()


def get_ascend_config():
    return config
