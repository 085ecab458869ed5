"""Tests that a module still computes what a replacement of it knows, and not what somebody has made of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import unwrap
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as of_all_modules

# Packages whose forward passes, and wrappers around them such as autocast, are known.
KNOWN_CODE: Final = ("torch", "transformers", "accelerate", "peft", "trl", "liger_kernel", "lightseq")
# Code whose hooks gather weights or watch values, and change none.
KNOWN_HOOKS: Final = (
    *("torch.distributed.fsdp", "torch.distributed._composable", "torch.utils.module_tracker"),
    *("transformers", "accelerate", "trl", "deepspeed", "lightseq"),
)
TORCH_LINEAR: Final = torch._C._nn.linear  # which torch.nn.functional.linear is
HOOKS: Final = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def plain_class(module: nn.Module) -> Any:
    """Returns the class of a module, or the one that it had before FSDP2 changed it."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def change_of(module: nn.Module) -> str | None:
    """Returns what was added to a module's forward pass, such as "has a forward hook"; None if nothing was."""
    if "forward" in vars(module):
        return "has a forward of its own"
    return hook_of(module)


def hook_of(module: nn.Module, kinds: Iterable[str] = HOOKS) -> str | None:
    """Returns the kind of hook that may change a module's values, such as "has a forward hook"; None without one."""
    for kind in kinds:
        name = kind.replace("_", " ").removesuffix("s")
        if not all(map(_is_known_hook, getattr(module, f"_{kind}").values())):
            return f"has a {name}"
        if not all(map(_is_known_hook, getattr(of_all_modules, f"_global_{kind}").values())):
            return f"has a {name}, as all modules do"
    return None


def product_change(linear: nn.Linear) -> str | None:
    """Returns why a linear may compute more than the product with its weights, such as "has a forward hook"."""
    kind = plain_class(linear)
    if kind.forward is not nn.Linear.forward:
        return f"is a {kind.__module__}.{kind.__qualname__}"
    if not is_known_code(nn.Linear.forward, ("torch",)):
        return "has a forward that replaces nn.Linear's"
    function = nn.functional.linear
    if function is not TORCH_LINEAR and not is_known_code(function, (*KNOWN_CODE, "deepspeed")):  # ZeRO-3 replaces it
        return "calls a function that replaces torch.nn.functional.linear"
    return change_of(linear)


def linear_change(module: Any) -> str | None:
    """Returns why a module is not torch's own linear with plain weights, None if it is; words as `product_change`."""
    kind = plain_class(module)
    if kind is not nn.Linear:
        return f"is a {kind.__module__}.{kind.__qualname__}"
    for x in (module.weight, module.bias):
        local = x._local_tensor if isinstance(x, DTensor) else x
        if local is not None and type(local) not in (Tensor, nn.Parameter):
            return f"has weights of the class {type(local).__name__}"
    return product_change(module)


def is_known_code(function: Any, packages: Iterable[str] = KNOWN_CODE) -> bool:
    """Returns whether a function, and all functions that it wraps, were written in some packages.

    Reads where functions were compiled, because `functools.wraps` copies the name of the module.
    """
    return all(_is_in(_written_in(one), packages) for one in functions_inside(function))


def functions_inside(function: Any) -> Iterator[Any]:
    """Yields a function, and all functions that it wraps or holds in another way."""
    pending, seen = [function], set[int]()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        pending += filter(_is_function, _wrapped(one))


def twin_forward(module: nn.Module, children: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Runs the forward of a module's class with the module's own attributes, and `children` in place of its modules.

    Neither hooks nor other modules run. Raises what the forward raises, as it does if it calls another module.
    """
    kind = plain_class(module)
    twin = object.__new__(kind)
    vars(twin).update(vars(module))
    vars(twin)["_modules"] = dict.fromkeys(module._modules) | dict(children)
    return kind.forward(twin, *args, **kwargs)


class StandIn:
    """Calls a function in place of a module. It has the module's numbers and tensors, but no methods and modules."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if callable(value):
            raise AttributeError(f"{name} of a stand-in")
        return value


def _is_known_hook(hook: Any) -> bool:
    hook = hook.func if isinstance(hook, partial) else hook
    return _is_in(_written_in(unwrap(hook)), KNOWN_HOOKS)


def _is_in(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _written_in(function: Any) -> str:
    """Returns the name of the module that a function, or the class of another callable, was written in."""
    if isinstance(function, MethodType):
        return _written_in(function.__func__)
    if isinstance(function, partial):
        return _written_in(function.func)
    if isinstance(function, FunctionType):
        return str(function.__globals__["__name__"])
    return type(function).__module__


def _is_function(x: Any) -> bool:
    """Returns whether a value is a function or an object that acts as one. Classes, modules and builtins are not."""
    if isinstance(x, FunctionType | MethodType | partial):
        return True
    return callable(x) and not isinstance(x, type | nn.Module) and type(x).__module__ != "builtins"


def _wrapped(function: Any) -> list[Any]:
    """Returns the values that a callable holds: its closure, its arguments or its attributes."""
    if isinstance(function, MethodType):
        return [function.__func__]
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, FunctionType):
        cells = function.__closure__ or ()
        return [cell.cell_contents for cell in cells if _is_filled(cell)]
    return list(vars(function).values()) if hasattr(function, "__dict__") else []


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is bound later
        return False
