"""Rows of TRL's AsyncGRPOTrainer, which packs rollouts that begin alike as a trie, in the form of nodes."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np

from lightseq.schedule.nodes import ROOT, Nodes

QUERY_EDGES, KEY_EDGES, KEYS = "tree_cu_seqlens_q", "tree_cu_seqlens_k", "tree_kv_index"
# Arguments of TRL's attention for a trie, and positions, which are depths.
TREE_ARGUMENTS: Final = (QUERY_EDGES, KEY_EDGES, KEYS, "tree_max_seqlen_q", "tree_max_seqlen_k")


def unpack_tree_row(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces TRL's arguments for a trie by nodes in the arguments of a model.

    Raises ValueError for a batch of several rows. Waits for the device, which has TRL's arguments.
    """
    if (rows := len(kwargs["input_ids"])) != 1:
        raise ValueError(f"a trie is one row, but input_ids has {rows}; pass one row at a time")
    others = {name: value for name, value in kwargs.items() if name not in (*TREE_ARGUMENTS, "position_ids")}
    edges, key_edges, keys = (kwargs[name].cpu().numpy() for name in (QUERY_EDGES, KEY_EDGES, KEYS))
    return {**others, "labels": None, "cu_seq_lens_q": nodes_of_paths(edges, key_edges, keys)}


def nodes_of_paths(edges: np.ndarray, key_edges: np.ndarray, keys: np.ndarray) -> Nodes:
    """Returns the nodes of a trie of segments, given the places of all tokens on each segment's path from the root.

    `edges` (segments + 1,) are where segments begin, and `key_edges` where their paths begin among `keys`.
    """
    parents = []
    for (start, stop), path_end, path_start in zip(pairwise(edges.tolist()), key_edges[1:], key_edges, strict=False):
        before = path_end - (stop - start)  # the path ends with the segment itself
        parent = ROOT if before == path_start else int(np.searchsorted(edges, keys[before - 1], side="right")) - 1
        parents.append(parent)
    return Nodes(tuple(edges.tolist()), tuple(parents))
