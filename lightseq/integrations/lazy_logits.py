"""Model outputs whose logits are gathered over ranks when they are first read."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, ItemsView, Iterator, KeysView, ValuesView
from dataclasses import fields
from functools import cache
from typing import Any, cast

from torch import Tensor
from transformers.utils import ModelOutput


def with_lazy_logits(output: ModelOutput, gather: Callable[[], Tensor]) -> ModelOutput:
    """Returns a model's output with logits that `gather` computes on first use; its class is a subclass."""
    lazy = _copied(output, _lazy_class(cast(Hashable, type(output))), "logits")
    object.__setattr__(lazy, "_gather_logits", gather)
    return lazy


def without(output: ModelOutput, name: str) -> ModelOutput:
    """Returns a copy of a model's output without a value; setting it to None would leave it in the mapping."""
    return _copied(output, type(output), name)


def _copied(output: ModelOutput, kind: type[ModelOutput], without: str) -> ModelOutput:
    values = {name: value for name, value in output.items() if name != without}
    known = {field.name for field in fields(output)}  # type: ignore[arg-type]
    copied = kind(**{name: value for name, value in values.items() if name in known})
    for name in values.keys() - known:
        copied[name] = values[name]
    return copied


@cache
def _lazy_class(kind: Any) -> Any:
    return type(kind)(kind.__name__, (_LazyLogits, kind), {"_plain_class": kind, "__module__": __name__})


class _LazyLogits:
    """Mixin before an output class. Its mapping and tuple interfaces include logits, which are gathered only when read.

    Logits come where the output's class has them: after the loss, or after the routers' loss.
    """

    _gather_logits: Callable[[], Tensor] | None = None
    _plain_class: type[ModelOutput]

    @property
    def logits(self) -> Tensor | None:
        gather = self._gather_logits
        if gather is not None:
            keys = self._keys()
            later = keys[keys.index("logits") + 1 :]
            self["logits"] = gather()  # type: ignore[index]  # also forgets `gather`
            for name in later:
                self.move_to_end(name)  # type: ignore[attr-defined]
        return self.__dict__.get("logits")

    @logits.setter
    def logits(self, value: Tensor | None) -> None:
        object.__setattr__(self, "_gather_logits", None)
        self.__dict__["logits"] = value

    def _keys(self) -> list[str]:
        keys: list[str] = list(OrderedDict.__iter__(self))  # type: ignore[arg-type]
        if self._gather_logits is not None:
            names = [field.name for field in fields(self)]  # type: ignore[arg-type]
            keys.insert(sum(name in keys for name in names[: names.index("logits")]), "logits")
        return keys

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            chosen = self._keys()[key]
            return self[chosen] if isinstance(chosen, str) else tuple(self[name] for name in chosen)
        if key == "logits" and self._gather_logits is not None:
            return self.logits
        return OrderedDict.__getitem__(self, key)  # type: ignore[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def __contains__(self, key: object) -> bool:
        return key in self._keys()

    def keys(self) -> KeysView[str]:
        return KeysView(self)  # type: ignore[arg-type]

    def values(self) -> ValuesView[Any]:
        return ValuesView(self)  # type: ignore[arg-type]

    def items(self) -> ItemsView[str, Any]:
        return ItemsView(self)  # type: ignore[arg-type]

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._keys() else default

    def __repr__(self) -> str:
        values = ("gathered when read" if self._is_unread(name) else repr(self[name]) for name in self)
        return f"{self._plain_class.__name__}({', '.join(map('='.join, zip(self, values, strict=True)))})"

    def _is_unread(self, name: str) -> bool:
        return name == "logits" and self._gather_logits is not None

    def __reduce__(self) -> Any:
        return self._plain_class(**dict(self)).__reduce__()  # type: ignore[arg-type]
