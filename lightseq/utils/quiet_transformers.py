"""Quiet import of transformers (and with it torchao), for modules that a user's own script imports."""

from lightseq.utils.process import silenced_loggers
from lightseq.utils.versions import check_transformers

check_transformers()
with silenced_loggers():
    import transformers.modeling_utils  # noqa: F401
