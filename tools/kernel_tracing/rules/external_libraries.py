"""Libraries without given sources that may launch kernels: all except the standard library and the infrastructure."""

from __future__ import annotations

import sys

# Third-party packages that frameworks use for purposes other than kernels. Torch is the framework itself: what it
# launches (`torch.matmul`) is not a kernel of a serving framework; its custom operators have a separate rule.
INFRASTRUCTURE = frozenset(
    (
        "IPython",
        "PIL",
        "accelerate",
        "aiohttp",
        "boto3",
        "compressed_tensors",
        "cv2",
        "decord",
        "dill",
        "einops",
        "fastapi",
        "fastsafetensors",
        "filelock",
        "gguf",
        "huggingface_hub",
        "jinja2",
        "jsonschema",
        "llguidance",
        "lmcache",
        "modelopt",
        "modelscope",
        "msgspec",
        "netifaces",
        "numpy",
        "nvtx",
        "openai",
        "opentelemetry",
        "orjson",
        "outlines",
        "outlines_core",
        "packaging",
        "pandas",
        "partial_json_parser",
        "prometheus_client",
        "psutil",
        "pybase64",
        "pydantic",
        "pynvml",
        "pyzmq",
        "ray",
        "redis",
        "regex",
        "requests",
        "runai_model_streamer",
        "safetensors",
        "scipy",
        "sentencepiece",
        "setproctitle",
        "tiktoken",
        "tokenizers",
        "torch",
        "torch_memory_saver",
        "torchvision",
        "tqdm",
        "transformers",
        "triton",
        "typing_extensions",
        "uvloop",
        "yaml",
        "zmq",
    )
)
# Functions that query, configure or build something on the host.
_HOST = ("get_", "set_", "is_", "has_", "supports_", "init", "create_", "make_", "load", "register", "_")


def may_launch(path: str) -> str:
    """The package of a dotted path if calls into it may launch kernels, otherwise ""."""
    package = path.partition(".")[0]
    return "" if package in INFRASTRUCTURE or package in sys.stdlib_module_names or "." not in path else package


def is_work(name: str) -> bool:
    """Whether a called name indicates real work: neither a class, nor a query, nor configuration."""
    return not name.startswith(_HOST) and not name[:1].isupper()
