"""The elastic protocol on plain vectors and maps: no torch, no vLLM.

The same decision code runs in a live engine, in the in-process test bed, in the
simulator and in unit tests (paper, sections 4.1 and 4.2).
"""
