"""Reading of user-written YAML and JSON files. Errors name the file and the line."""

from collections.abc import Callable
from json import JSONDecodeError
from pathlib import Path
from typing import Any, Final

import yaml

from lightseq.utils.files import CONFIG_BYTES, read_text
from lightseq.utils.formatting import first_line

REMEDY: Final = "give a valid YAML or JSON file"


class TextLoader(yaml.BaseLoader):
    """YAML loader that keeps every scalar as text: `no` does not become False, nor 10:12 a number of seconds."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found: dict[Any, Any] = super().construct_mapping(node, deep)  # raises for keys that are lists or mappings
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return found


def read_file(path: Path, parse: Callable[[str], Any]) -> Any:
    """Parses a file's text with `parse`. Raises ValueError if the file cannot be read or parsed."""
    try:
        return parse(read_text(path, CONFIG_BYTES))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {REMEDY}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is {first_line(error)}; {REMEDY}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply; {REMEDY}") from None
    except JSONDecodeError as error:
        raise ValueError(f"{path} line {error.lineno} is not valid JSON ({error.msg}); {REMEDY}") from None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: {error.problem}; {REMEDY}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
