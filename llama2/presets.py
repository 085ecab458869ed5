"""The published Llama 2 and Code Llama architectures, by name; lightseq/models/presets.py describes them."""

from lightseq.models.presets import LLAMA2 as FAMILY

PRESETS, ALIASES = FAMILY.presets, FAMILY.aliases
