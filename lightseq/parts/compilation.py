"""Settings of torch.compile for layers that are compiled one by one."""

import torch

MAX_GRAPHS = 64  # per layer: one for each batch length, in training and in evaluation, under two policies


def allow_graphs_per_length() -> None:
    """Lets a compiled layer have a graph for every batch length. After 8 of them, torch would run it eagerly."""
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
