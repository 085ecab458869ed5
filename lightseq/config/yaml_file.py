"""YAML and JSON files that people write. What is wrong with one is a line that names the file."""

from collections.abc import Callable
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import yaml


class TextLoader(yaml.BaseLoader):
    """YAML in which every scalar is the text that was typed: `no` is not False, and 10:12 not a number of seconds."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found: dict[Any, Any] = super().construct_mapping(node, deep)  # refuses keys that are lists or mappings
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return found


def read_file(path: Path, parse: Callable[[str], Any]) -> Any:
    """Returns what `parse` makes of a file's text. Raises ValueError for a file that cannot be read or parsed."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is no text in UTF-8") from None
    except RecursionError:
        raise ValueError(f"{path}: is nested too deeply") from None
    except JSONDecodeError as error:
        raise ValueError(f"{path} line {error.lineno}: is no JSON ({error.msg})") from None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
