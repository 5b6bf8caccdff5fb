"""What a machine that serves a model has: installed packages, and what torch says about its GPU."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

# Packages that SGLang imports if they are there, and that its own requirements do not install.
ABSENT = frozenset(
    {
        "aiter",
        "decord",
        "deep_ep",
        "deep_ep_cpp",
        "diffusers",
        "fast_hadamard_transform",
        "flash_attn",  # version 2; version 4 is below
        "flash_mla",
        "habana_frameworks",
        "lmcache",
        "mooncake",
        "mori",
        "msprobe",
        "mscclpp",
        "nixl",
        "nixl_ep",
        "pplx_kernels",
        "sgl_kernel_npu",
        "sgl_diffusion",
        "tilelang",
        "torch_musa",
        "torch_npu",
        "torchada",
        "torch_xla",
        "vllm",
        "wave_lang",
        "unimodel",
        "causal_conv1d",
        "cuda_dsv3",
        "fla",
        "mlx",
        "remote_pdb",
    }
)

# Modules of packages that sglang's requirements install and whose sources are not read, and the name of each package in
# a trace: a function imported from one is a kernel. flash-attn-4 shares its top package with the absent version 2.
KERNEL_MODULES = {"flash_attn.cute": "flash-attn-4"}


def is_absent(module: str) -> bool:
    """Whether a module, or a name of one, cannot be imported."""
    installed = any(f"{one}.".startswith(f"{module}.") or module.startswith(f"{one}.") for one in KERNEL_MODULES)
    return module.partition(".")[0] in ABSENT and not installed


_Version = namedtuple("_Version", ("major", "minor", "micro"))
CAPABILITIES = {"sm80": (8, 0), "sm89": (8, 9), "sm90": (9, 0), "sm100": (10, 0), "sm103": (10, 3), "sm120": (12, 0)}
NAMES = {
    "sm80": "NVIDIA A100",
    "sm89": "NVIDIA L40S",
    "sm90": "NVIDIA H200",
    "sm100": "NVIDIA B200",
    "sm103": "NVIDIA B300",
    "sm120": "NVIDIA RTX PRO 6000",
}
# GPUs that NVIDIA's HGX boards connect with NVSwitch, each with every other; the others are in PCIe slots.
FULL_NVLINK = frozenset({"sm80", "sm90", "sm100", "sm103"})
# Memory of one GPU in MiB, as nvidia-smi reports it in what each comment names. ServerArgs compares it with coarse
# limits (`_handle_gpu_memory_settings`: 20, 35, 60, 90 and 160 GiB).
MEMORY = {
    "sm80": 81920,  # A100 80GB: github.com/stas00/ml-engineering, compute/accelerator/nvidia/debug.md
    "sm89": 46068,  # L40S: github.com/akash-network/provider-configs/pull/99
    "sm90": 143771,  # H200: github.com/sgl-project/sglang/issues/3196
    "sm100": 183359,  # B200: github.com/NVIDIA/TensorRT-LLM/issues/10278
    "sm103": 275040,  # B300: github.com/ai-dynamo/aiconfigurator, systems/b300_sxm.yaml (mem_capacity)
    "sm120": 97887,  # RTX PRO 6000: github.com/ai-dynamo/aiconfigurator, systems/rtx_pro_6000_server.yaml
}


# Whether a CUDA graph is being captured.
CAPTURING = "torch.cuda.is_current_stream_capturing"


def answers(gpu: str, world: int) -> dict[str, Any]:
    """What functions and constants of torch say on this GPU, by path."""
    capability = CAPABILITIES[gpu]
    return {
        "torch.cuda.get_device_capability": capability,
        "torch.cuda.get_device_name": NAMES[gpu],
        "torch.cuda.is_available": True,
        "torch.cuda.device_count": world,
        "torch.cuda.current_device": 0,
        "torch.cuda.mem_get_info": (MEMORY[gpu] << 20, MEMORY[gpu] << 20),
        CAPTURING: False,
        "torch.version.hip": None,
        "torch.version.cuda": "13.0",
        "torch.__version__": "2.11.0",
        "triton.__version__": "3.6.0",
        "transformers.__version__": "5.17.0",
        "torch._dynamo.is_compiling": False,
        "torch.compiler.is_compiling": False,
        "torch.compiler.is_dynamo_compiling": False,
        "torch.xpu.is_available": False,
        "torch.mps.is_available": False,
        "torch.backends.mps.is_available": False,
        "torch.distributed.is_initialized": True,
        "torch.distributed.is_available": True,
        "torch.distributed.get_rank": 0,
        "torch.distributed.get_world_size": world,
        "torch.are_deterministic_algorithms_enabled": False,
        "typing.TYPE_CHECKING": False,
        "sys.platform": "linux",
        "sys.version_info": _Version(3, 12, 0),
        "sys.maxsize": 2**63 - 1,
        "platform.system": "Linux",
        "platform.machine": "x86_64",
        "multiprocessing.current_process().name": "scheduler",
        "os.sep": "/",
    }
