"""Downloads a model and its tokenizer to a directory, for compute nodes without a network.

python3 examples/chess/downloadmodel.py --model codellama/CodeLlama-7b-hf --output models/CodeLlama-7b-hf
"""

import argparse
import sys
from pathlib import Path

import huggingface_hub

FILES = ["*.safetensors", "*.json", "tokenizer*", "special_tokens_map.json"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="codellama/CodeLlama-7b-hf", help="hub id (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="directory (default: models/ plus the model's name)")
    arguments = parser.parse_args()
    output = arguments.output or Path("models") / arguments.model.split("/")[-1]
    try:
        huggingface_hub.snapshot_download(arguments.model, local_dir=output, allow_patterns=FILES)
    except Exception as error:  # OSError, ValueError, or an error of the HTTP client, which depends on the version
        reason = str(error).strip().splitlines()[0]
        print(f"error: {arguments.model} cannot be downloaded ({type(error).__name__}: {reason})", file=sys.stderr)
        return 2
    if not any(output.glob("*.safetensors")):
        print(f"error: {arguments.model} has no safetensors; use a repository that has them", file=sys.stderr)
        return 2
    print(f"saved; now run finetune.py with --model_name_or_path {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
