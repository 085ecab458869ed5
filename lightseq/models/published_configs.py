"""Published architectures of other families than Llama: a file each in `configs`.

A file has hub ids, the fields of their `config.json` that decide the model, and the number of parameters that the hub
counts in the first id's safetensors files. `not_in_model` counts weights of these files that the model does not have,
because they repeat others or transformers leaves them out.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "configs"
FILES: Final[Mapping[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))
}
CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {name: file["config"] for name, file in FILES.items()}
HUB_IDS: Final[Mapping[str, str]] = {hub_id: name for name, file in FILES.items() for hub_id in file["hub_ids"]}


def published_parameters(name: str) -> int:
    """Returns how many of the parameters that the hub counts belong to the model."""
    file = FILES[name]
    return int(file["published_parameters"]) - sum(file.get("not_in_model", {}).values())
