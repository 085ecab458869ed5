"""Changes of foreign modules, each recorded with the way to undo it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import nn
from torch.utils.hooks import RemovableHandle

RECORD: Final = "lightseq_changes"  # attribute of a model


@dataclass(frozen=True)
class _Change:
    """A change of a module: the way to undo it for good, and, if there is one, the way to pause it."""

    undo: Callable[[], object]
    pause: Callable[[], Callable[[], object]] | None = None  # returns what makes the change again


class Changes:
    """Changes of modules, which `undo` reverts, the latest first.

    An attribute that another library has replaced since stays as it is. In a deep copy of a model, a copy of the
    changes reverts the changes of the copied modules.
    """

    def __init__(self) -> None:
        self._changes: list[_Change] = []

    def set_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Sets an attribute of a module, or its class by the name of `__class__`."""
        before = _own_value(module, name)
        setattr(module, name, value)
        undo = partial(_replace, module, name, value, before)
        self._changes.append(_Change(undo, partial(_pause_attribute, module, name, undo)))

    def replace_forward(self, module: nn.Module, function: Callable[..., Any]) -> None:
        """Replaces a module's forward by `function(module, forward, ...)`, where `forward` is the original.

        If another library has wrapped it by the time of `undo`, then `function` goes on to be called.
        """
        self.set_attribute(module, "forward", partial(function, module, module.forward))

    def restore_later(self, module: nn.Module, name: str) -> None:
        """Records an attribute's current value, which `undo` restores."""
        before = _own_value(module, name)
        undo = partial(_restore, module, name, before)
        self._changes.append(_Change(undo, partial(_pause_attribute, module, name, undo)))

    def add_hook(self, hook: RemovableHandle) -> None:
        """Records a hook, which `undo` removes."""
        self._changes.append(_Change(hook.remove, partial(_pause_hook, hook)))

    def call_later(self, function: Callable[[], object], again: Callable[[], object] | None = None) -> None:
        """Makes `undo` call a function. Pass a method or a partial: what these hold is copied with a model.

        If `again` reverts what the function does, a pause calls the function, and `again` at its end.
        """
        self._changes.append(_Change(function, None if again is None else partial(_call, function, again)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Undoes the changes inside the block, and makes them again at its end.

        Compiled functions, hooks and the order of hooks stay. Functions of `call_later` are not called.
        """
        resume = [change.pause() for change in reversed(self._changes) if change.pause is not None]
        try:
            yield
        finally:
            for function in reversed(resume):
                function()

    def undo(self) -> None:
        """Reverts all changes. A second call does nothing."""
        while self._changes:
            self._changes.pop().undo()


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


def _pause_attribute(module: nn.Module, name: str, undo: Callable[[], object]) -> Callable[[], object]:
    now = _own_value(module, name)
    undo()
    return partial(_restore, module, name, now)


def _pause_hook(hook: RemovableHandle) -> Callable[[], object]:
    """Replaces a hook by a function that does nothing. Returns a function that puts the hook back."""
    hooks = hook.hooks_dict_ref()
    if hooks is None or hook.id not in hooks:
        return _nothing
    now, hooks[hook.id] = hooks[hook.id], _nothing
    return partial(hooks.__setitem__, hook.id, now)


def _call(function: Callable[[], object], again: Callable[[], object]) -> Callable[[], object]:
    function()
    return again


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass
