"""The published Llama 3, 3.1 and 3.2 architectures, by name; lightseq/models/presets.py describes them."""

from lightseq.models.presets import LLAMA3 as FAMILY

PRESETS, ALIASES = FAMILY.presets, FAMILY.aliases
