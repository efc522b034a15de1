"""FlexFloor inside vLLM: the engine-core hook, the worker extension and the device modules."""
