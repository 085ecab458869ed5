"""Checks whether a module still runs the code of its class, and functions that read and run this code."""

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial, wraps
from inspect import unwrap
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final, ParamSpec

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as of_all_modules

from lightseq.models.packed import PackedWeight

# Packages whose forward passes, and wrappers around them such as autocast, are known.
KNOWN_CODE: Final = ("torch", "transformers", "accelerate", "peft", "trl", "liger_kernel", "lightseq")
# Code whose hooks gather weights or watch values, and change none.
KNOWN_HOOKS: Final = (
    *("torch.distributed.fsdp", "torch.distributed._composable", "torch.utils.module_tracker"),
    *("transformers", "accelerate", "trl", "deepspeed", "lightseq"),
)
TORCH_LINEAR: Final = torch._C._nn.linear  # torch.nn.functional.linear is the same object
HOOKS: Final = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
EMPTY_CELL: Final = CellType()  # a closure's variable that is not assigned yet
P = ParamSpec("P")


def plain_class(module: nn.Module) -> Any:
    """Returns the class of a module, or the one that it had before FSDP2 changed it."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def is_unchanged(module: nn.Module, packages: Iterable[str] = KNOWN_CODE) -> bool:
    """Returns whether a module has the forward of its class, which these packages wrote, and no hooks."""
    return change_of(module) is None and is_known_code(plain_class(module).forward, packages)


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


def _is_known_hook(hook: Any) -> bool:
    hook = hook.func if isinstance(hook, partial) else hook
    return _is_in(_written_in(unwrap(hook)), KNOWN_HOOKS)


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
        if local is not None and type(local) not in (Tensor, nn.Parameter, PackedWeight):
            return f"has weights of the class {type(local).__name__}"
    return product_change(module)


def is_known_code(function: Any, packages: Iterable[str] = KNOWN_CODE) -> bool:
    """Returns whether a function, and all functions that it wraps, were written in some packages.

    Reads where functions were compiled, because `functools.wraps` copies the name of the module.
    """
    return all(_is_in(_written_in(one), packages) for one in reached(function, functions_held))


def _is_in(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _written_in(function: Any) -> str:
    """Returns the name of the module that a function, or the class of another callable, was written in."""
    if isinstance(function, MethodType | partial):
        return _written_in(_held(function)[0])
    if isinstance(function, FunctionType):
        return str(function.__globals__["__name__"])
    return type(function).__module__


def reached(start: Any, follow: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yields an object, and all that `follow` leads to, once each."""
    pending, seen = [start], set[int]()
    while pending:
        one = pending.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            pending += follow(one)


def functions_held(function: Any) -> list[Any]:
    """Returns the functions that a callable itself holds: in its closure, its arguments or its attributes."""
    return [x for x in _held(function) if _is_function(x)]


def _is_function(x: Any) -> bool:
    """Returns whether a value is a function or an object that acts as one. Classes, modules and builtins are not."""
    if isinstance(x, FunctionType | MethodType | partial):
        return True
    return callable(x) and not isinstance(x, type | nn.Module) and type(x).__module__ != "builtins"


def _held(function: Any) -> list[Any]:
    if isinstance(function, MethodType):
        return [function.__func__]
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, FunctionType):
        return [cell.cell_contents for cell in function.__closure__ or () if cell != EMPTY_CELL]
    return list(vars(function).values()) if hasattr(function, "__dict__") else []


@cache
def _names(code: CodeType, only_globals: bool) -> frozenset[str]:
    """Returns the names of globals, and of attributes, that a function's code uses, with the functions inside it."""
    loads = (x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL")
    inner = (_names(x, only_globals) for x in code.co_consts if isinstance(x, CodeType))
    return frozenset(loads if only_globals else code.co_names).union(*inner)


def named_in(function: Any, only_globals: bool = False) -> dict[str, Any]:
    """Maps the names in a function's code to globals of its file, or None."""
    if not isinstance(function, FunctionType):
        return {}
    return {name: function.__globals__.get(name) for name in _names(function.__code__, only_globals)}


@contextmanager
def plain_numbers(gradients: bool = False) -> Iterator[None]:
    """Runs the block on the CPU without autocast, and without gradients unless `gradients`."""
    with torch.device("cpu"), torch.set_grad_enabled(gradients), torch.autocast("cpu", enabled=False):
        yield


def runs_on_numbers(probe: Callable[P, bool]) -> Callable[P, bool]:
    """Makes a test answer False if the code that it runs on `plain_numbers` raises anything."""

    @wraps(probe)
    def recognizes(*args: P.args, **kwargs: P.kwargs) -> bool:
        try:
            with plain_numbers():
                return probe(*args, **kwargs)
        except Exception:  # the model's code may raise anything
            return False

    return recognizes


def run_twin(module: nn.Module, children: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
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
