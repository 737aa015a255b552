"""Builds a model without weights: parameters on meta, everything else as the factory makes it.

A factory called inside `torch.device("meta")` would leave buffers that no checkpoint holds (a rotary
embedding's frequencies, a causal mask) without values, and with them plain tensors that a module keeps as
attributes. So the factory runs as usual, and each parameter is exchanged for one on meta when it is
registered, before it is initialised. The memory of `torch.empty`, with which torch's own modules make
parameters, is never touched.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from probes.errors import PlacementError
from probes.machine.torchfacts import first_line

Factory = Callable[[], nn.Module]


def build(factory: Factory) -> nn.Module:
    """The factory's model in evaluation mode, its parameters on meta and without gradients.

    Raises PlacementError when the factory returns anything but a module, makes tensor subclasses, or reads
    values of parameters. Errors of its own are its own.
    """
    try:
        with _parameters_on_meta(), torch.inference_mode(False):
            model = factory()
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error).lower():
            raise
        raise PlacementError(
            "the factory reads values of parameters, which have none before the checkpoint is loaded: "
            f"{first_line(error)}",
            "leave that out of the factory, or load the model yourself and give it to place()",
        ) from error
    if not isinstance(model, nn.Module):
        raise PlacementError(
            f"the factory returned {type(model).__name__}, not a torch.nn.Module",
            "pass a function without arguments that builds the model",
        )
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if (
                parameter is not None and parameter.device.type != "meta"
            ):  # put there past `register_parameter`
                module._parameters[name] = _bare(parameter)
    return model.requires_grad_(False).eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """In this thread, every parameter that is registered is exchanged for one on meta. Ties are kept."""
    thread = threading.get_ident()
    met: dict[int, nn.Parameter] = {}
    alive: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()

    def exchange(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter is None or parameter.device.type == "meta":
            return None
        if alive.get(id(parameter)) is not parameter:
            alive[id(parameter)], met[id(parameter)] = parameter, _bare(parameter)
        return met[id(parameter)]

    hook = register_module_parameter_registration_hook(exchange)
    try:
        yield
    finally:
        hook.remove()


def _bare(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter without its values. Refuses tensor subclasses, which hold more than that."""
    if type(parameter.data) is not torch.Tensor:
        raise PlacementError(
            f"the factory makes parameters of type {type(parameter.data).__name__}",
            "build the model without quantisation or other tensor subclasses",
        )
    values = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    made = nn.Parameter(values, requires_grad=False)
    made.__dict__.update(parameter.__dict__)
    return made
