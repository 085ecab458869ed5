"""Training script for Llama 3.

python3 -m torch.distributed.run --nproc_per_node=4 llama3/train.py --help
"""

import sys
from pathlib import Path

# The script runs uninstalled, and no module of this folder hides a package.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lightseq.training.command import main
from llama3 import FAMILY

if __name__ == "__main__":
    main(FAMILY)
