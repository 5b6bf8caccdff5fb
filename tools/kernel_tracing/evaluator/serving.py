"""A step of serving: what SGLang does with one configuration, from its settings to a prefill and a decode."""

from __future__ import annotations

import ast
import gc
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from tools.kernel_tracing.evaluator.core import Event, Frame
from tools.kernel_tracing.evaluator.machine import Machine
from tools.kernel_tracing.evaluator.values import (
    Builtin,
    Class,
    External,
    Instance,
    ModuleObject,
    Scope,
    Value,
)
from tools.kernel_tracing.rules import serving_steps
from tools.kernel_tracing.rules.platforms import Platform
from tools.kernel_tracing.source.index import Index


@dataclass(frozen=True)
class Configuration:
    """What decides the kernels of a step.

    Attributes:
        model: the contents of the model's config.json.
        settings: fields of ServerArgs that differ from their defaults.
        gpu: the generation of the GPU, such as sm90.
        environment: environment variables.
        name: what the configuration is called in a trace.
        prompts: tokens of each request of the batch.
    """

    model: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    gpu: str = "sm90"
    environment: dict[str, str] = field(default_factory=dict)
    name: str = "default"
    prompts: tuple[int, ...] = serving_steps.PROMPTS


@dataclass
class Step:
    """What one configuration runs.

    Attributes:
        configuration: what was evaluated.
        events: the kernels, in execution order.
        problems: what could not be evaluated, and how often.
        modules: the modules that code of the model calls and that run no kernel, by `order` among the events.
        resolved: fields of ServerArgs as SGLang computed them.
    """

    configuration: Configuration
    events: list[Event]
    problems: dict[str, int]
    modules: list[Event] = field(default_factory=list)
    resolved: dict[str, Any] = field(default_factory=dict)


class Serving:
    """Evaluates one configuration."""

    # The file of the frames that start a step.
    FILE = serving_steps.STARTS[-1]

    def __init__(self, index: Index, configuration: Configuration, platform: str = "cuda") -> None:
        self.configuration = configuration
        world = int(configuration.settings.get("tp_size", 1))
        self.machine = Machine(index, Platform(platform), configuration.gpu, world)
        self.machine.environment |= configuration.environment
        self.machine.overrides |= serving_steps.overrides(configuration.gpu)
        self.config: Instance = self._object(configuration.model)
        for name in serving_steps.MODEL_CONFIG:
            self.machine.overrides[name] = lambda core, args, kwargs: self.config
        for name in serving_steps.MODEL_CLASS:
            self.machine.overrides[name] = lambda core, args, kwargs: self._architecture()

    def _object(self, values: dict[str, Any]) -> Instance:
        module = ModuleObject("transformers", "")
        node = ast.parse("class PretrainedConfig: ...").body[0]
        assert isinstance(node, ast.ClassDef)
        info = Class("PretrainedConfig", "PretrainedConfig", module, node, [])
        info.order, info.externals = [info], frozenset({"transformers.PretrainedConfig"})
        config = Instance(info, serving_steps.CONFIG_DEFAULTS | values)
        for name in serving_steps.part_configs(config.fields):
            config.fields[name] = self._object(config.fields[name])
        text = config.fields.get("text_config")
        config.fields["get_text_config"] = Builtin("get_text_config", lambda core, args, kwargs: text or config)
        config.fields["update"] = Builtin("update", lambda core, args, kwargs: config.fields.update(args[0]))
        config.fields["to_dict"] = Builtin("to_dict", lambda core, args, kwargs: dict(values))
        return config

    def _architecture(self) -> Value:
        name = self.configuration.model["architectures"][0]
        for module in self.machine.index.class_modules(serving_steps.MODELS, name):
            found = self.machine.imported(module, name)
            if isinstance(found, Class):
                return (found, name)
        raise LookupError(f"no model class {name} in sglang/srt/models")

    def run(self) -> Step:
        """Evaluates the step in a thread with a large stack, because calls nest as deeply as in the traced program."""
        found: list[Step] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                found.append(self._run())
            except BaseException as error:
                errors.append(error)

        limit, collecting = sys.getrecursionlimit(), gc.isenabled()
        gc.disable()  # syntax trees and the objects of a step are never garbage before its end
        sys.setrecursionlimit(30_000)
        previous = threading.stack_size(512 << 20)
        try:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        finally:
            threading.stack_size(previous)
            sys.setrecursionlimit(limit)
            self.machine.release()
            if collecting:
                gc.enable()
        for error in errors:
            raise error
        return found[0]

    def _run(self) -> Step:
        machine = self.machine
        module = ModuleObject("serving", self.FILE)
        module.started = True
        scope = Scope(module.scope.names, None, module)
        machine.stack = [Frame(module, "", scope)]
        settings, prompts = dict(self.configuration.settings), list(self.configuration.prompts)
        module.scope.names |= {"settings": settings, "prompts": prompts, "phase": External("phase")}
        for phase, text in serving_steps.PHASES:
            machine.phase = phase
            for statement in ast.parse(text).body:
                machine.run([statement])
        events, modules = list(machine.events.values()), list(machine.plain_modules.values())
        server = scope.names.get("server_args")
        found = server.fields if isinstance(server, Instance) else {}
        plain = (str, int, float, bool)
        resolved = {name: found[name] for name in serving_steps.RESOLVED if isinstance(found.get(name), plain)}
        return Step(self.configuration, events, machine.problems, modules, resolved)
