"""What the stand-in saw, in order; one journal a process."""

entries: list[tuple] = []
phase = ["start"]
broken: list[str] = []
"""Rules that were broken, each as "rule: what"."""


def note(*entry):
    entries.append(entry)


def enter(name, serial):
    phase[0] = name
    note("phase", name, serial)


def breaks(rule, what):
    broken.append(f"{rule}: {what}")


def clear():
    entries.clear()
    phase[0] = "start"
    broken.clear()
