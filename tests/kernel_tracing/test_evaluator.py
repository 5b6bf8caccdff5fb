"""The evaluator on small sources: what is decided takes one branch, what is not takes both."""

from __future__ import annotations

import pytest
from small_sources import evaluate

from tools.kernel_tracing.configuration.requested import ConfigurationError, model_config, parse
from tools.kernel_tracing.evaluator.values import Unknown


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("True", ["one"]),
        ("not (False or 3 < 2)", ["one"]),
        ("torch.cuda.get_device_capability() >= (10, 0)", ["other"]),
        ("torch.version.hip is not None", ["other"]),
        ("unknown()", ["one", "other"]),
        ("unknown() and False", ["other"]),
        ("unknown() or True", ["one"]),
        ("not unknown() or False", ["one", "other"]),
        ("torch.zeros(3, 5).shape[1] == 5", ["one"]),
        ("torch.zeros(3, 5).view(-1, 3).shape[0] == 5", ["one"]),
        ("torch.zeros(3, dtype=torch.float).dtype == torch.float32", ["one"]),
        ("isinstance(torch.zeros(3), tuple)", ["other"]),
    ],
)
def test_a_test_takes_the_branches_that_it_may(tmp_path, test, expected):
    source = f"""
    from elsewhere import unknown_things
    def unknown():
        return torch.empty(2).item()
    def run():
        if {test}:
            one[1](0)
        else:
            other[1](0)
    """
    assert evaluate(tmp_path, source)[0] == expected


def test_fields_of_two_objects_of_one_class_are_apart(tmp_path):
    source = """
    class Layer(nn.Module):
        def __init__(self, fast):
            super().__init__()
            self.fast = fast
        def forward(self, x):
            (one if self.fast else other)[1](x)
    def run():
        first, second = Layer(True), Layer(False)
        second(0)
    """
    assert evaluate(tmp_path, source)[0] == ["other"]


def test_enumerations_dataclasses_and_properties(tmp_path):
    source = """
    from dataclasses import dataclass, field
    from enum import Enum, auto
    class Backend(Enum):
        A = auto()
        B = "b"
        def is_b(self):
            return self == Backend.B
    @dataclass
    class Settings:
        backend: Backend = Backend.A
        names: list = field(default_factory=list)
        def __post_init__(self):
            if not self.names:
                self.backend = Backend("b")
        @property
        def kernel(self):
            return one if self.backend.is_b() else other
    def run():
        Settings().kernel[1](0)
        Settings(names=[1]).kernel[1](0)
        return Settings().backend.value
    """
    kernels, result, _ = evaluate(tmp_path, source)
    assert (kernels, result) == (["one", "other"], "b")


def test_a_context_manager_goes_on_after_its_block_is_left(tmp_path):
    source = """
    from contextlib import contextmanager
    @contextmanager
    def around():
        one[1](0)
        yield 5
        other[1](0)
    @contextmanager
    def never():
        raise ValueError("no")
        yield
    def leave():
        with around() as value:
            return value
    def run():
        for _ in range(3):
            with around():
                break
        try:
            with never():
                pass
        except ValueError:
            return leave(), "caught"
    """
    kernels, result, machine = evaluate(tmp_path, source)
    assert (kernels, result) == (["one", "other", "one", "other"], (5, "caught"))
    assert len(machine.stack) == 1


def test_fields_that_are_set_and_read_past_the_hooks_of_a_class(tmp_path):
    source = """
    class Frozen:
        fast: bool = False
        def __setattr__(self, name, value):
            raise AttributeError(name)
        def resolve(self):
            object.__setattr__(self, "fast", True)
            return object.__getattribute__(self, "fast")
    def run():
        settings = Frozen()
        (one if settings.fast else other)[1](0)
        read = settings.resolve()
        (one if settings.fast else other)[1](0)
        return read
    """
    assert evaluate(tmp_path, source)[:2] == (["other", "one"], True)


def test_modules_of_a_dictionary_are_called(tmp_path):
    source = """
    class Layer(nn.Module):
        def forward(self, x):
            one[1](x)
    def run():
        layers = nn.ModuleDict()
        layers[str(0)] = Layer()
        layers["0"](0)
    """
    assert evaluate(tmp_path, source)[0] == ["one"]


def test_an_evaluation_ends_with_nothing_kept(tmp_path):
    machine = evaluate(tmp_path, "class Layer: ...\ndef run(): ...")[2]
    module, (layer,) = machine.modules["app.main"], machine.classes
    machine.release()
    assert not (module.scope.names or layer.order or layer.names or machine.modules or machine.stack or machine.events)


def test_a_context_manager_restores_what_it_set_only_afterwards(tmp_path):
    source = """
    from contextlib import contextmanager
    mode = "outside"
    @contextmanager
    def inside():
        global mode
        mode = "inside"
        try:
            yield
        finally:
            mode = "outside"
    def launch():
        (one if mode == "inside" else other)[1](0)
    def run():
        with inside():
            launch()
        launch()
    """
    kernels, _, machine = evaluate(tmp_path, source)
    assert kernels == ["one", "other"]
    (first, _) = machine.events.values()
    assert [hop.function for hop in first.chain] == ["launch", "run", ""]


def test_what_one_branch_sets_is_kept_beside_what_was_there(tmp_path):
    source = """
    class Holder:
        kernel = one
    def run():
        holder = Holder()
        if torch.empty(2).item():
            holder.kernel = other
        if holder.kernel is other:
            other[1](0)
        return holder.kernel
    """
    kernels, _, machine = evaluate(tmp_path, source)
    assert kernels == ["other"]
    assert any(test.open for event in machine.events.values() for hop in event.chain for test in hop.tests)


def test_a_branch_that_raises_is_not_taken(tmp_path):
    source = """
    def pick():
        if torch.empty(2).item():
            raise ValueError("no")
        return one
    def run():
        pick()[1](0)
        return pick() is one
    """
    assert evaluate(tmp_path, source)[:2] == (["one"], True)


def test_a_missing_package_is_noticed_where_it_is_caught(tmp_path):
    source = """
    try:
        import deep_ep
        found = True
    except ImportError:
        found = False
    def run():
        return found
    """
    assert evaluate(tmp_path, source)[1] is False


def test_a_function_of_a_package_whose_sources_are_not_read_is_a_kernel(tmp_path):
    source = """
    try:
        from flash_attn.cute import flash_attn_varlen_func as cute
    except Exception:
        cute = None
    def absent():
        try:
            from flash_attn import flash_attn_func
        except ImportError:
            return True
    def absent_module():
        try:
            from flash_attn.flash_attn_interface import flash_attn_varlen_func
        except ImportError:
            return True
    def run():
        result = cute(q=torch.empty(3, 8, 128), k=torch.empty(3, 8, 128))
        return absent(), absent_module(), result.shape[0]
    """
    kernels, result, machine = evaluate(tmp_path, source)
    assert (kernels, result) == (["flash_attn_varlen_func"], (True, True, 3))
    assert [event.source for event in machine.events.values()] == ["flash-attn-4"]


def test_unknown_sizes_are_not_zero(tmp_path):
    source = """
    def run():
        rows = torch.empty(2).nonzero().shape[0]
        return (rows > 0, rows == 0, rows > 16)
    """
    positive, zero, many = evaluate(tmp_path, source)[1]
    assert (positive, zero) == (True, False)
    assert isinstance(many, Unknown)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attention_backend=fa3", "names no model"),
        ("model=deepseek-v3,fast", "'fast' is not name=value"),
        ("model=deepseek-v3,gpu=sm10", "gpu=sm10 is not known"),
        ("model=nothing", "no such file"),
    ],
)
def test_a_configuration_that_cannot_be_used(text, message):
    with pytest.raises(ConfigurationError, match=message):
        parse(text)


def test_a_configuration_is_read():
    found = parse("model=deepseek-v3,tp=8,quantization=none,SGLANG_ENABLE_JIT_DEEPGEMM=0,moe_runner_backend=triton")
    assert found.settings["tp_size"] == 8
    assert found.settings["moe_runner_backend"] == "triton"
    assert found.environment["SGLANG_ENABLE_JIT_DEEPGEMM"] == "0"
    assert "quantization_config" not in found.model
    assert model_config("deepseek-v3")["quantization_config"]["activation_scheme"] == "dynamic"
