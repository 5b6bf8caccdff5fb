"""Categories of kernels, by words in the kernel's name, or else in the defining file, or else in the calling file."""

from __future__ import annotations

from tools.kernel_tracing.rules.platforms import name_words

# The first category that has one of the words applies; more specific words come first.
_CATEGORIES: tuple[tuple[str, frozenset[str]], ...] = (
    ("communication", frozenset({"allreduce", "reduce_scatter", "allgather", "mscclpp", "alltoall", "comm", "ar"})),
    ("speculative decoding", frozenset({"speculative", "tree", "draft", "eagle", "spec", "ngram", "verify"})),
    ("sampling", frozenset({"sampling", "sampler", "renorm", "penalty", "logits", "softcap", "bitmask", "grammar"})),
    ("MoE", frozenset({"moe", "experts", "expert", "topk", "ep", "shuffle", "gate", "routing"})),
    (
        "attention",
        frozenset({"attention", "attn", "mla", "flash", "decode", "prefill", "nsa", "fla", "merge", "paged"}),
    ),
    ("attention", frozenset({"xqa", "mamba", "conv", "delta", "gla", "kda", "ssd", "chunk", "indices"})),
    ("memory", frozenset({"kv", "cache", "memory", "pool", "alloc", "memcpy", "transfer", "copy", "mem"})),
    ("rotary embedding", frozenset({"rope", "rotary", "mrope"})),
    ("normalisation", frozenset({"rmsnorm", "layernorm", "norm", "qknorm"})),
    ("activation", frozenset({"silu", "gelu", "activation", "act", "swiglu", "elementwise"})),
    ("quantisation", frozenset({"quant", "quantize", "dequantize", "quantization", "repack", "shuffle", "scale"})),
    ("gemm", frozenset({"gemm", "mm", "bmm", "matmul", "marlin", "linear"})),
    ("quantisation", frozenset({"fp", "int", "awq", "gptq"})),
)


def categorise(name: str, source: str, definition: str, caller: str) -> str:
    """The category of a kernel."""
    for text in (name, definition.partition("/")[2], caller.partition("/")[2]):
        words = set(name_words(text))
        for category, telling in _CATEGORIES:
            if words & telling:
                return category
    return "other"
