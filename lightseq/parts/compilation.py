"""Settings of torch.compile for layers that are compiled one by one."""

import torch

MAX_GRAPHS = 64  # per layer: one for each batch length, in training and in evaluation, under two policies


def allow_graphs_per_length() -> None:
    """Raises torch's limit of compiled graphs per layer. After 8 batch lengths it would run the layer eagerly."""
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
