"""FlexFloor: elastic expert parallelism for reinforcement-learning rollouts of MoE models."""

__version__ = "0.1.0"
