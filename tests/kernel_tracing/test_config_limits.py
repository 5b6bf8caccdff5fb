"""`--config` and `--server`: what the tracer does not evaluate, or nothing reads, is refused and never ignored."""

from __future__ import annotations

import pytest
from release import SOURCES, needs_sources

from tools.kernel_tracing.configuration.limits import NOT_EVALUATED, check_covered, check_environment
from tools.kernel_tracing.configuration.listed import configurations
from tools.kernel_tracing.configuration.requested import ConfigurationError
from tools.kernel_tracing.rules import serving_steps
from tools.kernel_tracing.source.sources import find_sources


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("speculative_algorithm", "EAGLE", "speculative_algorithm=EAGLE: the tracer does not evaluate speculative dec"),
        ("enable_lora", True, "enable_lora=true: the tracer does not evaluate LoRA; leave it out"),
        ("lora_paths", "a=b", "lora_paths=a=b: the tracer does not evaluate LoRA"),
        ("pp_size", 2, "pp_size=2: the tracer does not evaluate pipeline parallelism"),
        ("disaggregation_mode", "decode", "does not evaluate disaggregation of prefill and decode"),
        ("enable_torch_compile", True, "enable_torch_compile=true: the tracer does not evaluate torch.compile"),
        ("disable_piecewise_cuda_graph", False, "does not evaluate piecewise CUDA graphs"),
        ("moe_a2a_backend", "deepep", "does not evaluate DeepEP"),
    ],
)
def test_what_is_not_evaluated(name, value, message):
    with pytest.raises(ConfigurationError) as error:
        check_covered({"tp_size": 8, name: value})
    assert message in str(error.value) and "docs/kernel_tracing.md" in str(error.value)


def test_settings_that_switch_it_off_and_those_of_the_list_are_covered():
    check_covered({"enable_lora": False, "speculative_algorithm": None, "pp_size": 1, "disaggregation_mode": "null"})
    check_covered({name: neutral[0] for name, (neutral, _) in NOT_EVALUATED.items()})
    for one in configurations().values():
        check_covered(serving_steps.SETTINGS | dict(one.server))


@needs_sources
def test_environment_variables_are_those_that_the_sources_read():
    sources = find_sources(SOURCES)
    check_environment({name for one in configurations().values() for name in one.environment}, sources)
    # Declared in environ.py, read by os.environ, read by get_bool_env_var, and set in every configuration.
    check_environment(["SGLANG_ENABLE_JIT_DEEPGEMM", "CUDA_VISIBLE_DEVICES", "SGLANG_IS_IN_CI"], sources)
    check_environment(serving_steps.ENVIRONMENT, sources)
    with pytest.raises(ConfigurationError, match=r"_DEEPGEM: .*; did you mean SGLANG_ENABLE_JIT_DEEPGEMM\?$"):
        check_environment(["SGLANG_ENABLE_JIT_DEEPGEM"], sources)
    with pytest.raises(ConfigurationError, match=r"^XYZZY: these sources read no such .*; leave it out$"):
        check_environment(["XYZZY"], sources)
