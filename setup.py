"""Package metadata; tools are configured in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
TENSORBOARD = ["tensorboard>=2.15,<3"]
WANDB = ["wandb>=0.31,<1"]
TRACKIO = ["trackio>=0.43,<1"]
# GLUE with transformers' Trainer, and its metrics.
GLUE = ["accelerate>=1.7,<2", "scikit-learn>=1.4,<2", "scipy>=1.11,<2"]
# Metrics of generated text.
NLG = ["nltk>=3.9.1,<4", "sacrebleu>=2.4,<3"]
# METEOR 1.5, which runs on Java: 100 MB.
METEOR = ["pycocoevalcap>=1.2,<2"]
# The server, and for answers that follow a JSON schema and tool calls that are demanded a grammar.
SERVING = ["starlette>=1.0.1,<2", "uvicorn>=0.35,<1", "llguidance>=1.9,<2"]
# The client that programs get.
AGENTS = [*SERVING, "openai>=2,<4"]
# The Tinker API: its client's package has the types of its messages.
TINKER = [*SERVING, "tinker>=0.38,<0.39"]
# dschat-lora eval --tasks, and builtin:ifeval.
EVALUATION = ["lm-eval[ifeval]>=0.4.13,<0.5"]
# dschat-lora tune.
PLANNING = ["optuna>=5.0,<6"]
# Near duplicates, and languages.
AUDIT = ["datasketch>=2.0,<3", "py3langid>=0.4,<0.5"]
# The documentation, which needs nothing of the package itself (make docs), and its pictures.
DOCS = [
    "mkdocs>=1.6,<2",
    "mkdocs-material>=9.6,<10",
    "mkdocstrings>=0.30,<2",
    "mkdocstrings-python>=1.16,<3",
    "ruff>=0.8,<1",
    "matplotlib>=3.9,<4",
]
# --base_bits 4: packs the frozen base; transformers loads such checkpoints with accelerate.
QLORA = ["bitsandbytes>=0.50,<1", "accelerate>=1.2,<2"]
# Built-in rewards that compare formulas and JSON.
REWARDS = ["math-verify>=0.9,<1", "jsonschema>=4.23,<5"]
# --environment LIBRARY:NAME, by library.
ENVIRONMENTS = ["reasoning-gym>=0.1.25,<0.2"]
GYMNASIUM = ["gymnasium>=1.0,<2"]
MCP = ["mcp>=2,<3"]
OPENENV = ["openenv-core>=0.3,<0.4"]
VERIFIERS = ["verifiers>=0.4,<0.5"]
# Rows with pictures, by image processors that need Pillow alone.
IMAGES = ["pillow>=11,<14", "transformers>=5.23,<6"]
# Bases in GGUF files of most architectures.
GGUF = ["gguf>=0.19,<1"]
# What the benchmark compares with.
BENCH = ["peft>=0.18,<1", "trl>=1.16,<2"]
# Jupyter's kernel for the notebooks, which draw curves.
NOTEBOOK = ["ipykernel>=6.29,<8", "matplotlib>=3.9,<4"]
TEST = [
    *TENSORBOARD,
    *BENCH,
    *GLUE,
    *NLG,
    *AGENTS,
    *TINKER,
    *QLORA,
    *REWARDS,
    *ENVIRONMENTS,
    *GYMNASIUM,
    *MCP,
    *GGUF,
    *NOTEBOOK,
    *PLANNING,
    *AUDIT,
    *IMAGES,
    "nbclient>=0.10,<1",
    "nbformat>=5.10,<6",
    "loralib>=0.1.2,<0.2",
    "hypothesis>=6.100,<7",
    # kernels by its interpreter; on a GPU torch brings it along
    "triton>=3.2,<4; platform_system == 'Linux'",
    "pytest>=8,<10",
    "pytest-cov>=5,<8",
    "pytest-xdist>=3.5,<4",
]

setup(
    name="dschat_lora",
    version="0.3.0",
    description="LoRA RLHF on DeepSpeed: supervised fine-tuning, reward model or DPO, PPO",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["dschat_lora", "dschat_lora.*"]),
    # configs, a link to the one of the checkout, is a directory of its own in a wheel.
    package_data={
        "dschat_lora": [
            *("assets/**/*", "assets/*.md", "configs/**/*", "configs/*/*"),
            *("addons/*/page/*", "addons/*/*.json", "py.typed", "__init__.pyi"),
        ]
    },
    install_requires=[
        "torch>=2.6,<3",
        "deepspeed>=0.19,<0.20",
        "transformers>=5,<6",
        "datasets>=3,<6",
        "sentencepiece>=0.2,<0.3",
        "safetensors>=0.4.3,<1",
        "numpy>=1.26,<3",
        "packaging>=23",
        "pyarrow>=15",
        "jinja2>=3.1,<4",
        "psutil>=5.9,<8",
        "pyyaml>=6,<7",
        "tqdm>=4.66.3,<5",
        "regex>=2024.4.16",
        "tokenizers>=0.22,<1",
        "huggingface_hub>=1.31,<3",
    ],
    extras_require={
        # of add-ons, by their names
        "agents": AGENTS,
        "audit": AUDIT,
        "evaluation": EVALUATION,
        "glue": GLUE,
        "images": IMAGES,
        "nlg": NLG,
        "planning": PLANNING,
        "serving": SERVING,
        "tinker": TINKER,
        # of options
        "environments": ENVIRONMENTS,
        "gguf": GGUF,
        "gymnasium": GYMNASIUM,
        "mcp": MCP,
        "meteor": METEOR,
        "openenv": OPENENV,
        "qlora": QLORA,
        "rewards": REWARDS,
        "tensorboard": TENSORBOARD,
        "trackio": TRACKIO,
        "verifiers": VERIFIERS,
        "wandb": WANDB,
        # of the checkout
        "bench": BENCH,
        "docs": DOCS,
        "notebook": NOTEBOOK,
        "test": TEST,
        "dev": [*TEST, "mypy>=1.13,<3", "ruff>=0.8,<1", "vermin>=1.9,<2"],
        # the same by other names
        "dedup": AUDIT,
        "eval": EVALUATION,
        "serve": SERVING,
        "structured": SERVING,
        "tune": PLANNING,
    },
    entry_points={"console_scripts": ["dschat-lora=dschat_lora.__main__:main"]},
)
