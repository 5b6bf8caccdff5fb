"""What an embedded reference may not use, as data.

A reference is mathematics on tensors. It runs in other people's benchmark processes, so it must not read files, start
compilers or change state that outlives the call. The lists are explicit; each name that they refuse is one that a
reference was never seen to need.
"""

from __future__ import annotations

__all__ = ["ALLOWED_IMPORTS", "FORBIDDEN_ATTRIBUTES", "FORBIDDEN_TORCH", "TORCH_MODULES"]

#: Modules that an import statement may name.
ALLOWED_IMPORTS = frozenset(
    {"math", "torch", "torch.nn", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special"}
)

#: Paths that are modules: they may only stand before a dot, so that no alias hides what is called.
TORCH_MODULES = ALLOWED_IMPORTS - {"math"}


def _names(*groups: str) -> frozenset[str]:
    return frozenset(name for group in groups for name in group.split())


#: Parts of a dotted path that begins at torch.
FORBIDDEN_TORCH = _names(
    # Files, processes, compilers, devices, extension points
    "load save hub ops classes utils package jit compile compiler export fx library cpp storage serialization",
    "from_file distributed multiprocessing parallel futures profiler monitor testing onnx overrides func autograd",
    "optim ao amp quantization accelerator mps mtia xpu cpu cuda backends windows version torch_version",
    "UntypedStorage TypedStorage from_dlpack to_dlpack get_file_path import_ir_module",
    # Global state: defaults, modes, threads, random generators
    "set_default_dtype set_default_device set_default_tensor_type get_default_dtype get_default_device",
    "set_num_threads set_num_interop_threads set_printoptions set_flush_denormal set_float32_matmul_precision",
    "set_deterministic_debug_mode set_warn_always set_grad_enabled set_anomaly_enabled set_autocast_enabled",
    "set_autocast_dtype set_autocast_cpu_enabled set_autocast_cpu_dtype set_autocast_gpu_dtype autocast",
    "set_autocast_cache_enabled use_deterministic_algorithms",
    "manual_seed seed initial_seed random set_rng_state get_rng_state quasirandom",
    # Modules that torch happens to expose
    "os sys builtins importlib ctypes inspect functools glob platform textwrap threading types warnings dataclasses",
    "np torch",
)

#: Attributes of any object.
FORBIDDEN_ATTRIBUTES = _names(
    # Files and memory that others see
    "tofile save share_memory_ data_ptr storage untyped_storage set_ pin_memory numpy",
    # Autograd machinery and hooks
    "backward register_hook register_post_accumulate_grad_hook requires_grad_ grad_fn",
    # str.format reads attributes that no check of the source sees; f-strings do the same openly
    "format format_map",
    # Frames and code objects
    "gi_frame gi_code gi_yieldfrom cr_frame cr_code ag_frame ag_code tb_frame tb_next f_back f_builtins f_code",
    "f_globals f_locals co_code func_globals mro",
)
