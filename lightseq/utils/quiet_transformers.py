"""Imports transformers, and with it torchao, without what they log; for modules that a user's own script imports."""

from lightseq.utils.quiet import silenced_loggers

with silenced_loggers():
    import transformers.modeling_utils  # noqa: F401
