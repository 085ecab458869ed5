"""Changes of foreign modules, each recorded with the way to undo it."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch import nn
from torch.utils.hooks import RemovableHandle

RECORD: Final = "lightseq_changes"  # attribute of a model


class Changes:
    """Changes of modules, which `undo` reverts, the latest first.

    An attribute that another library has replaced since stays as it is. In a deep copy of a model, a copy of the
    changes reverts the changes of the copied modules.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Sets an attribute of a module, or its class by the name of `__class__`."""
        before = _own_value(module, name)
        setattr(module, name, value)
        self._undo.append(partial(_replace, module, name, value, before))

    def replace_forward(self, module: nn.Module, function: Callable[..., Any]) -> None:
        """Lets a module's forward be `function(module, forward, ...)`, where `forward` is what it was.

        If another library has wrapped it by the time of `undo`, then `function` goes on to be called.
        """
        self.set_attribute(module, "forward", partial(function, module, module.forward))

    def restore_later(self, module: nn.Module, name: str) -> None:
        """Lets `undo` give an attribute the value that it has now, whoever sets it until then."""
        self._undo.append(partial(_restore, module, name, _own_value(module, name)))

    def add_hook(self, hook: RemovableHandle) -> None:
        """Takes over a hook, which `undo` removes."""
        self._undo.append(hook.remove)

    def call_later(self, function: Callable[[], object]) -> None:
        """Lets `undo` call a function. Pass a method or a partial: what these hold is copied with a model."""
        self._undo.append(function)

    def undo(self) -> None:
        """Reverts all changes. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


def changes_of(model: nn.Module) -> Changes:
    """Returns the record of what training has changed in a model, which the model holds."""
    if RECORD not in vars(model):
        setattr(model, RECORD, Changes())
    return vars(model)[RECORD]  # type: ignore[no-any-return]


def _own_value(module: nn.Module, name: str) -> tuple[Any, ...]:
    """Returns a module's own attribute in a tuple; empty if only its class has one."""
    if name == "__class__":
        return (type(module),)
    return (vars(module)[name],) if name in vars(module) else ()


def _replace(module: nn.Module, name: str, value: Any, before: tuple[Any, ...]) -> None:
    own = _own_value(module, name)
    if own and own[0] is value:
        _restore(module, name, before)


def _restore(module: nn.Module, name: str, before: tuple[Any, ...]) -> None:
    if before:
        setattr(module, name, before[0])
    elif name in vars(module):
        delattr(module, name)
