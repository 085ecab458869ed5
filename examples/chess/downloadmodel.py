"""Fetches a model and its tokenizer into a directory, for compute nodes without a network.

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
    parser.add_argument("--output", type=Path, help="directory (default: models/ and the model's own name)")
    arguments = parser.parse_args()
    output = arguments.output or Path("models") / arguments.model.split("/")[-1]
    try:
        huggingface_hub.snapshot_download(arguments.model, local_dir=output, allow_patterns=FILES)
    except Exception as error:  # OSError, ValueError, or a class of the HTTP client, which is not always the same one
        reason = str(error).strip().splitlines()[0]
        print(f"error: {arguments.model} cannot be fetched ({type(error).__name__}: {reason})", file=sys.stderr)
        return 2
    if not any(output.glob("*.safetensors")):
        print(f"error: {arguments.model} has no safetensors; name a repository that has", file=sys.stderr)
        return 2
    print(f"{output}: give it to finetune.py as --model_name_or_path {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
