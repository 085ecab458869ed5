"""Published architectures of a model family, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFamily:
    """Published architectures by name (`LlamaConfig` arguments), and the hub ids with the same architecture."""

    name: str
    presets: Mapping[str, Mapping[str, object]]
    aliases: Mapping[str, str]
    # Presets with a size in their name.
    scaled_preset: Callable[[str], Mapping[str, object] | None] = lambda _name: None
    program: str = ""  # training program; default: the train.py of its folder
    sibling: str = ""  # package name of the other family; the two do not import each other

    def preset(self, name: str) -> Mapping[str, object] | None:
        """Returns the architecture of that name, if the family has one."""
        return self.presets.get(name) or self.scaled_preset(name)
