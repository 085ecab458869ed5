"""Exact training of Llama 2 and Llama 3 on sequences longer than a GPU holds."""

import logging

from lightseq.ranks.environment import lock_pages_on_all_threads, use_large_pages

__version__ = "0.1.0"

# transformers imports torchao wherever it is installed, and torchao complains of kernels that this machine cannot load
# (torch of how it declares its types), on every rank. What is asked of torchao and cannot be had is refused in words.
# The compiler asks of every checkpoint with a policy that nothing in it works in place: nothing does in a layer.
for _name in ("torchao", "torch.utils._pytree", "torch._higher_order_ops.wrap"):
    logging.getLogger(_name).setLevel(logging.ERROR)

use_large_pages()
lock_pages_on_all_threads()
