"""What the tracer does not evaluate, and environment variables that nothing reads: both are refused, never ignored."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tools.kernel_tracing.configuration.checks import check_settings
from tools.kernel_tracing.configuration.requested import ConfigurationError
from tools.kernel_tracing.rules import serving_steps
from tools.kernel_tracing.source.sources import SourceTree

#: Values that switch something off, beside those of a release's defaults in `NOT_EVALUATED`.
_OFF = (None, False, "none", "")
#: Fields of ServerArgs that change which kernels run in ways that the tracer does not follow -> the values that do not,
#: and what it is that is not evaluated.
NOT_EVALUATED: dict[str, tuple[tuple[Any, ...], str]] = {
    "speculative_algorithm": (_OFF, "speculative decoding"),
    "enable_multi_layer_eagle": (_OFF, "speculative decoding"),
    "enable_lora": (_OFF, "LoRA"),
    "lora_paths": (_OFF, "LoRA"),
    "pp_size": ((1,), "pipeline parallelism"),
    "nnodes": ((1,), "servers of several machines"),
    "disaggregation_mode": ((*_OFF, "null"), "disaggregation of prefill and decode"),
    "encoder_only": (_OFF, "disaggregation of the encoder"),
    "language_only": (_OFF, "disaggregation of the encoder"),
    "enable_pdmux": (_OFF, "multiplexing of prefill and decode"),
    "enable_torch_compile": (_OFF, "torch.compile"),
    "enable_piecewise_cuda_graph": (_OFF, "piecewise CUDA graphs"),
    "enforce_piecewise_cuda_graph": (_OFF, "piecewise CUDA graphs"),
    "disable_piecewise_cuda_graph": ((True,), "piecewise CUDA graphs"),
    "torchao_config": (_OFF, "quantisation by torchao"),
    "moe_a2a_backend": (_OFF, "DeepEP and other all-to-all communication of experts"),
    "enable_deepep_moe": (_OFF, "DeepEP and other all-to-all communication of experts"),
    "enable_eplb": (_OFF, "rebalancing of experts"),
    "enable_two_batch_overlap": (_OFF, "the overlap of batches"),
    "enable_single_batch_overlap": (_OFF, "the overlap of batches"),
    "enable_hierarchical_cache": (_OFF, "caches outside the GPU"),
    "enable_lmcache": (_OFF, "caches outside the GPU"),
    "dllm_algorithm": (_OFF, "diffusion models"),
    "is_embedding": (_OFF, "embedding models"),
    "model_impl": (("auto", "sglang"), "models that other libraries implement"),
}
#: How Python reads an environment variable, and how SGLang's environ.py declares one. Names with these prefixes may
#: also be read through a constant.
_READ = re.compile(
    r"""(?:getenv|environ(?:\.\w+)?|env_var)\s*[\[(]\s*["']([A-Z][A-Z0-9_]*)["']"""
    r"""|["']([A-Z][A-Z0-9_]*)["']\s+(?:not\s+)?in\s+os\.environ"""
    r"""|["']((?:SGLANG|SGL|FLASHINFER)_[A-Z0-9_]+)["']"""
    r"""|^\s+([A-Z][A-Z0-9_]*)\s*=\s*Env\w+\(""",
    re.M,
)


def check_server(settings: Mapping[str, Any], environment: Iterable[str], sources: SourceTree) -> None:
    """Checks that a release has these settings and variables and takes the values, and that the tracer covers them.

    Args:
        settings: fields of ServerArgs.
        environment: names of environment variables.

    Raises: ConfigurationError, which names the setting, and what is allowed.
    """
    check_settings(settings, sources)
    check_covered(settings)
    check_environment(environment, sources)


def check_covered(settings: Mapping[str, Any]) -> None:
    """Checks that the tracer evaluates what these settings ask for.

    Raises: ConfigurationError.
    """
    for name, value in settings.items():
        neutral, what = NOT_EVALUATED.get(name, ((value,), ""))
        if not any(value is one or (type(value) is type(one) and value == one) for one in neutral):
            text = str(value).lower() if isinstance(value, bool) else value
            raise ConfigurationError(
                f"{name}={text}: the tracer does not evaluate {what}; leave it out (docs/kernel_tracing.md, What is "
                "missing)"
            )


def check_environment(names: Iterable[str], sources: SourceTree) -> None:
    """Checks that the sources read these environment variables; those that every configuration sets are left out.

    Raises: ConfigurationError.
    """
    asked = sorted(set(names) - set(serving_steps.ENVIRONMENT))
    if not asked:
        return
    known = {name for name in asked if any(name in _read(text) for text in _texts(sources) if name in text)}
    for name in asked:
        if name not in known:
            close = difflib.get_close_matches(name, sorted(set().union(*map(_read, _texts(sources)))), 1)
            hint = f"; did you mean {close[0]}?" if close else "; leave it out"
            raise ConfigurationError(f"{name}: these sources read no such environment variable{hint}")


def _texts(sources: SourceTree) -> Iterator[str]:
    return (sources.text(module) for module in sources.modules)


def _read(text: str) -> set[str]:
    """The environment variables that a module reads."""
    return {next(filter(None, found)) for found in _READ.findall(text)}
