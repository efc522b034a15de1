"""Runs a plan on real engines: Ray, the rollout server around vLLM's AsyncLLM, its watchdog, and the run directory.

Speaks Ray and (inside the server) vLLM; knows nothing of verl.
"""
