"""Kernels for rmsnorm_h512 that compute when their call has returned, and the clock of a timed one has stopped."""

from __future__ import annotations

import builtins
import contextlib
import gc
import signal
import sys

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: The work left to do, and the modes that are active.
LEFT, ACTIVE = [], []

#: The built-in function itself, and the events that the audit hook has seen since it was last armed.
ISSUBCLASS, EVENTS = issubclass, []


def right(hidden_states, weight):
    """The function that all of them pretend to compute."""
    x = hidden_states.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(hidden_states.dtype)


def empty(hidden_states, weight):
    """The output, which `finish` will fill."""
    output = torch.empty_like(hidden_states)
    LEFT[:] = [(hidden_states, weight, output)]
    return output


def finish():
    """Does what is left to do."""
    if LEFT:
        hidden_states, weight, output = LEFT.pop()
        output.copy_(right(hidden_states, weight))


def in_a_lazy_list(hidden_states, weight):
    """Returns a list that is empty until somebody iterates over it."""

    class Lazy(list):
        def __len__(self):
            return 1

        def __iter__(self):
            yield right(hidden_states, weight)

    return Lazy()


def in_a_lazy_dict(hidden_states, weight):
    """Returns a dict that computes the value of a key."""

    class Lazy(dict):
        def keys(self):
            return ["output"]

        def __iter__(self):
            return iter(["output"])

        def __getitem__(self, key):
            return right(hidden_states, weight)

    return Lazy(output=None)


def in_a_lazy_key(hidden_states, weight):
    """Returns a dict whose key computes when somebody asks for its name."""

    class Key(str):
        def __str__(self):
            finish()
            return "output"

    return {Key("output"): empty(hidden_states, weight)}


def in_a_lazy_class(hidden_states, weight):
    """Returns a tuple that computes when `isinstance` asks for its class."""

    class Lazy(tuple):
        @property
        def __class__(self):
            finish()
            return tuple

    return Lazy([empty(hidden_states, weight)])


def in_a_method_of_torch(hidden_states, weight):
    """Replaces `copy_` for one use."""

    def copy_(self, *others, **options):
        del torch.Tensor.copy_
        finish()
        return self.copy_(*others, **options)

    output = empty(hidden_states, weight)
    torch.Tensor.copy_ = copy_
    return output


def in_a_function_mode(hidden_states, weight):
    """Leaves a mode active that computes when torch copies a tensor."""

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.copy_:
                finish()
            return function(*args, **(kwargs or {}))

    return in_a_mode(Mode, hidden_states, weight)


def in_a_dispatch_mode(hidden_states, weight):
    """The same one level below, where torch dispatches its operators."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.copy_.default:
                finish()
            return function(*args, **(kwargs or {}))

    return in_a_mode(Mode, hidden_states, weight)


def in_a_mode(mode, hidden_states, weight):
    if not ACTIVE:
        ACTIVE.append(mode())
        ACTIVE[0].__enter__()
    return empty(hidden_states, weight)


def in_an_operator(hidden_states, weight):
    """Gives torch a kernel of its own for copies."""

    def copy_(to, source, non_blocking=False):
        finish()
        return torch.add(source, 0, out=to)

    if not ACTIVE:
        ACTIVE.append(torch.library.Library("aten", "IMPL"))
        ACTIVE[0].impl("copy_", copy_, hidden_states.device.type.upper())
    return empty(hidden_states, weight)


def in_a_profile_function(hidden_states, weight):
    """Has Python call it when the stopwatch returns."""

    def profile(frame, event, argument):
        if event == "return" and frame.f_code.co_name == "mark":
            sys.setprofile(None)
            finish()

    output = empty(hidden_states, weight)
    sys.setprofile(profile)
    return output


def in_a_collection_of_garbage(hidden_states, weight):
    """Has Python call it when garbage is collected, which happens all the time, once the clock has stopped."""

    def collected(phase, information):
        if any(frame.co_name in ("stored", "late") for frame in codes(sys._getframe(1))):
            finish()

    if not ACTIVE:
        ACTIVE.append(collected)
        gc.callbacks.append(collected)
        gc.set_threshold(1)
    return empty(hidden_states, weight)


def in_a_comparison_of_classes(hidden_states, weight):
    """Returns a tensor of a class whose own class computes when somebody asks whether it is torch's."""

    class Meta(type(torch.Tensor)):
        def __eq__(cls, other):
            finish()
            return True

        __hash__ = type.__hash__

    class Lazy(torch.Tensor, metaclass=Meta):
        pass

    return empty(hidden_states, weight).as_subclass(Lazy)


def in_a_builtin(hidden_states, weight):
    """Replaces `issubclass` for one use."""

    def late(*arguments):
        builtins.issubclass = ISSUBCLASS
        finish()
        return ISSUBCLASS(*arguments)

    output = empty(hidden_states, weight)
    builtins.issubclass = late
    return output


def in_an_audit_hook(hidden_states, weight):
    """Has Python call it for the second event after its return, when the stopwatch has been stopped for the first."""

    def hook(event, arguments):
        if event == "sys.setprofile" and LEFT:
            EVENTS.append(event)
            if len(EVENTS) == 2:
                finish()

    if not ACTIVE:
        ACTIVE.append(hook)
        sys.addaudithook(hook)
    EVENTS.clear()
    return empty(hidden_states, weight)


def in_a_context_manager(hidden_states, weight):
    """Replaces how `with` enters what `contextlib` makes."""
    kind = contextlib._GeneratorContextManager
    enter = kind.__enter__

    def late(self):
        if any(code.co_name == "run" for code in codes(sys._getframe(1))):
            kind.__enter__ = enter
            finish()
        return enter(self)

    output = empty(hidden_states, weight)
    kind.__enter__ = late
    return output


def in_an_attribute_of_torch(hidden_states, weight):
    """Makes torch a module of another class, which computes when somebody looks for the class of tensors."""

    class Lazy(type(torch)):
        def __getattribute__(self, name):
            if name == "Tensor" and LEFT:
                finish()
            return super().__getattribute__(name)

    output = empty(hidden_states, weight)
    torch.__class__ = Lazy
    return output


def in_a_handler_of_signals(hidden_states, weight):
    """Has the system interrupt what comes after it."""

    def handler(number, frame):
        if any(code.co_name in ("stored", "late") for code in codes(frame)):
            finish()
        elif LEFT:
            signal.setitimer(signal.ITIMER_REAL, 2e-5)

    output = empty(hidden_states, weight)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 2e-5)
    return output


def codes(frame):
    """The code of a frame and of its callers."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
