"""CANN's copy between host and device; level 2 makes none."""


def memcpy(*args):
    raise AssertionError("level 2 keeps no copy")
