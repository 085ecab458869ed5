"""Training script of Llama 3 across ranks.

python3 -m torch.distributed.run --nproc_per_node=4 llama3/train.py --help
"""

import sys
from pathlib import Path

sys.path[0] = str(
    Path(__file__).resolve().parent.parent
)  # so that the script runs uninstalled and this folder hides no package

from lightseq.training.command import main
from llama3 import FAMILY

if __name__ == "__main__":
    main(FAMILY)
