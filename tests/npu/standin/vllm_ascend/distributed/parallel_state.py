_MC2 = None


def get_mc2_group():
    return _MC2
