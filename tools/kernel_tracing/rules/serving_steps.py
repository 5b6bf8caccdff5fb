"""How SGLang serves a step: what starts it, and the functions whose results the machine decides, not the code."""

from __future__ import annotations

import ast
from typing import Any

from tools.kernel_tracing.rules import environments

# Functions that read the model's config.json.
MODEL_CONFIG = ("get_config", "get_hf_text_config", "ServerArgs.get_hf_config")
# Where the models are.
MODELS = "sglang.srt.models."
MODEL_FILES = "sglang/srt/models/"
# Where SGLang's classes of configurations are, and the property of those some of whose layers keep a recurrent state.
CONFIGS = "sglang.srt.configs."
CONFIG_FILES = "sglang/srt/configs/"
RECURRENT = "mamba2_cache_params"
# What starts a step here; a server starts it from its scheduler. Chains end below it.
STARTS = ("sglang/bench_one_batch.py", "sglang/benchmark/one_batch.py", "<serving>")
# Functions that find the model's class.
MODEL_CLASS = ("get_model_architecture", "ModelRegistry.resolve_model_cls")
_START = """
import torch
from sglang.srt.server_args import ServerArgs, PortArgs
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang import bench_one_batch as bench
server_args = ServerArgs(**settings)
initialize_moe_config(server_args)
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
initialize_fp8_gemm_config(server_args)
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
initialize_fp4_gemm_config(server_args)
model_config = ModelConfig.from_server_args(server_args)
sizes = dict(tp_size=server_args.tp_size, moe_ep_size=server_args.ep_size, pp_size=1)
ranks = dict(gpu_id=0, tp_rank=0, moe_ep_rank=0, pp_rank=0, nccl_port=1)
fraction = server_args.mem_fraction_static
runner = ModelRunner(model_config=model_config, mem_fraction_static=fraction, server_args=server_args, **sizes, **ranks)
if hasattr(runner, "init_attention_backends"):  # releases whose constructor only loads the model
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
def requests():
    reqs = []
    for i, n in enumerate(prompts):
        params = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, max_new_tokens=16) if i % 2 else SamplingParams(
            temperature=0.7, top_p=0.95, max_new_tokens=16)
        params.normalize(None)
        req = Req(rid=str(i), origin_input_text="", origin_input_ids=list(range(n)), sampling_params=params)
        req.fill_ids = req.origin_input_ids
        req.logprob_start_len = -1
        if hasattr(req, "set_extend_range"):
            req.set_extend_range(0, n)
        else:
            req.set_extend_input_len(len(req.fill_ids) - len(req.prefix_indices))
        reqs.append(req)
    return reqs
def min_p_requests():
    reqs = requests()
    for req in reqs:
        req.sampling_params.min_p = 0.1
    return reqs
def cached_requests():
    reqs = requests()
    for req, n in zip(reqs, prompts):
        cached = n // 2 // runner.page_size * runner.page_size
        req.prefix_indices = torch.empty(cached, dtype=torch.int64)
        if hasattr(req, "set_extend_range"):
            req.set_extend_range(cached, n)
        else:
            req.set_extend_input_len(n - cached)
    return reqs
"""
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
# Files that check the arguments of a server against the model and the GPU: what they raise is an answer to these. What
# other files raise may be due to something that is not known.
STARTING = (
    "sglang/srt/server_args.py",
    "sglang/srt/configs/",
    "sglang/srt/model_executor/model_runner",
    "sglang/srt/model_loader/",
    "sglang/srt/layers/attention/attention_registry.py",
    "sglang/srt/layers/quantization/__init__.py",
    "sglang/srt/layers/quantization/fp4_utils.py",
    "sglang/srt/layers/quantization/fp8_utils.py",
    "sglang/jit_kernel/flash_attention_v3.py",
)
# Settings of ServerArgs without which a step cannot be evaluated, or is evaluated needlessly long.
SETTINGS: dict[str, Any] = {
    "model_path": "/model",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "device": "cuda",
    "disable_cuda_graph": True,
    "cuda_graph_bs": [1, 2, 4, 8],
    "disable_piecewise_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.8,
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "chunked_prefill_size": 4096,
    "context_length": 4096,
    "random_seed": 1,
    "log_level": "warning",
    "tp_size": 1,
}
# DeepGEMM compiles its kernels ahead by calling them with made-up inputs.
ENVIRONMENT = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
# What a config.json says that models/ leaves out because no Definition depends on it.
MODEL_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "model_type": "model",
    "mlp_bias": False,
    "use_sliding_window": False,
}
# What SGLang rewrites in a config.json as it loads it, by architecture (`_load_deepseek_v32_model`, for a type of
# model that transformers lacks).
REWRITTEN: dict[str, dict[str, Any]] = {
    "DeepseekV32ForCausalLM": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
}
# Tokens of the requests of a batch.
PROMPTS = (300, 17)
# What sglang.bench_one_batch does between two batches.
_CLEAR = "runner.req_to_token_pool.clear()\nrunner.token_to_kv_pool_allocator.clear()\n"
PHASES = (
    ("load", _START),
    ("prefill", "ids, logits, batch = bench.extend(requests(), runner)"),
    ("decode", "ids, logits = bench.decode(ids, batch, runner)"),
    ("extend", _CLEAR + "bench.extend(cached_requests(), runner)"),
    ("min_p", _CLEAR + "bench.extend(min_p_requests(), runner)"),
)
# Phases that differ from a prefill in one part only, which follows the model's forward, and the group of that work.
PARTIAL = {"min_p": "sampling"}
FORWARD = "ModelRunner.forward"
# The function below which a CUDA graph is captured while a server loads, the phase that replays the graph, and what
# follows it there.
CAPTURE = "CudaGraphRunner._capture_graph"
REPLAYED = "decode"
AFTER_REPLAY = "ModelRunner.sample"
# Fields of ServerArgs that SGLang computes if they are not given, and that choose kernels.
RESOLVED = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "sampling_backend",
    "moe_runner_backend",
    "fp8_gemm_runner_backend",
    "kv_cache_dtype",
    "page_size",
    "disable_cuda_graph",
    "enable_deterministic_inference",
    "tp_size",
    "ep_size",
)

# What the quantization_config of a config.json says besides, by method.
QUANTIZATION_DEFAULTS: dict[str, dict[str, Any]] = {"fp8": {"activation_scheme": "dynamic", "fmt": "e4m3"}}


def _resolvable(core: Any, args: list[Any], kwargs: dict[str, Any]) -> frozenset[str]:
    """The fields of ServerArgs whose annotation says `Arg(..., resolvable=True)`, which models may change."""
    return frozenset(
        ast.unparse(node.target)
        for info in args[0].order
        for node in info.node.body
        if isinstance(node, ast.AnnAssign)
        for call in ast.walk(node.annotation)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "resolvable" and ast.unparse(keyword.value) == "True"
    )


def _same_batch(core: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """With data parallelism, each rank tells the others the size of its batch: here, all have the same one."""
    info = args[0].fields
    for name in ("num_tokens", "num_tokens_for_logprob"):
        info[f"global_{name}"] = [info[name]] * info["dp_size"]
    info["tp0_info"] = core.call_external("torch.empty", [(info["dp_size"], 6)], {})
    return None


def _captured_sizes(core: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The batch sizes for which CUDA graphs are captured, as the setting gives them; none is compiled by torch."""
    given = args[0].fields["server_args"].fields
    return list(given.get("cuda_graph_bs", SETTINGS["cuda_graph_bs"])), []  # newer releases name the setting otherwise


def _places_of_experts(core: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Where the copies of each expert are: data of the load balancer, here one copy of each."""
    layers = core.item(core.load(kwargs.get("physical_to_logical_map"), "shape"), 0)
    return core.call_external("torch.empty", [(layers, kwargs.get("num_logical_experts"), 1)], {})


#: The order in which Marlin's kernels read scales, as `get_scale_perms` of SGLang's marlin_utils.py makes it; it is
#: asked once for each expert of a layer.
SCALE_ORDER = (
    [row + 8 * column for row in range(8) for column in range(8)],
    [2 * row + column for row in range(4) for column in (0, 1, 8, 9, 16, 17, 24, 25)],
)


def _gib(gpu: str) -> float:
    return environments.MEMORY[gpu] / 1024


def overrides(gpu: str) -> dict[str, Any]:
    """Results of SGLang's functions that ask the machine, by qualified name."""
    return {
        "get_device_memory_capacity": environments.MEMORY[gpu],
        "get_nvgpu_memory_capacity": environments.MEMORY[gpu],
        "get_available_gpu_memory": _gib(gpu),
        "get_device": "cuda",
        "get_device_core_count": 132,
        "get_device_sm": lambda core, args, kwargs: (
            environments.CAPABILITIES[gpu][0] * 10 + environments.CAPABILITIES[gpu][1]
        ),
        "get_device_capability": environments.CAPABILITIES[gpu],
        "get_nvidia_driver_version": (580, 65, 6),
        "get_generation_config": None,
        "get_sparse_attention_config": lambda core, args, kwargs: {},
        "get_quantization_config_from_file": None,
        "monkey_patch_vllm_gguf_config": None,
        "maybe_offload_to_cpu": lambda core, args, kwargs: args[0],
        "initialize_dummy_weights": None,
        "is_flashinfer_available": True,
        "is_in_ci": False,
        "is_remote_url": False,
        "is_runai_obj_uri": False,
        "resolvable_fields": _resolvable,
        "assert_flag_parity": None,
        "MLPSyncBatchInfo.all_gather": _same_batch,
        "get_batch_sizes_to_capture": _captured_sizes,
        "_compute_logical_to_all_physical_map": _places_of_experts,
        "get_scale_perms": SCALE_ORDER,
        # FlashInfer's workspace needs free memory and peers that NVSwitch joins.
        "ensure_workspace_initialized": gpu in environments.FULL_NVLINK,
        "can_use_custom_all_reduce_with_nvlink": gpu in environments.FULL_NVLINK,
        "ModelRunner.init_cublas": None,
        "ModelRunner.kernel_warmup": None,
        "ModelRunner.init_shared_mooncake_transfer_engine": None,
        "ModelRunner._pre_initialize_flashinfer_allreduce_workspace": None,
        "ModelConfig._verify_transformers_version": None,
        "ModelConfig._find_quant_modelslim_config": None,
        "ServerArgs._handle_ssl_validation": None,
        "ServerArgs._handle_deprecated_args": None,
        "check_pkg_version_at_least": True,
        "assert_pkg_version": None,
        "set_gpu_proc_affinity": None,
        "monkey_patch_p2p_access_check": None,
        "numa_bind_to_node": None,
        "in_the_same_node_as": lambda core, args, kwargs: [True],
        "is_port_available": True,
        "get_zmq_socket": None,
        "monkey_patch_torch_compile": None,
        "_Dumper.may_enable": False,
        "CudaGraphRunner.can_run": True,  # the batches fit into the sizes that SETTINGS give
    }


# Fields that every PretrainedConfig of transformers has.
CONFIG_DEFAULTS: dict[str, Any] = dict.fromkeys(
    (
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "cross_attention_hidden_size",
    ),
)
CONFIG_DEFAULTS |= {
    "name_or_path": "model",
    "tie_word_embeddings": True,
    "is_encoder_decoder": False,
    "use_cache": True,
}
CONFIG_DEFAULTS |= {
    "output_hidden_states": False,
    "output_attentions": False,
    "return_dict": True,
    "chunk_size_feed_forward": 0,
}


def part_configs(config: dict[str, Any]) -> list[str]:
    """The fields of a config.json that transformers makes objects of: text_config, vision_config and the like."""
    return [
        name
        for name, value in config.items()
        if isinstance(value, dict) and name.endswith("_config") and name != "quantization_config"
    ]
