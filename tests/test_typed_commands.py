"""Every command of every page, typed at tiny scale on the CPU, or listed here with the reason why it is not."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest
from byte_level import VOCABULARY, byte_level
from pages import GUIDES, OURS, ROOT, command_lines, split
from transformers import AutoModelForCausalLM

from benchmarks.tiny_models import tiny_config

# Commands that are not typed here: a pattern, and the reason.
NOT_TYPED = {
    r"\bpip install\b": "needs a network",
    r"^source \.venv/": "needs the environment that `make` installs",
    r"^make (test|check)": "runs this test too",
    r"\bsbatch\b|^for variant|^done$": "needs Slurm; test_slurm.py has a stand-in for it",
    r"^(podman|enroot)\b": "needs containers",
    r"^sky launch": "needs a cloud; test_launch_clouds.py runs the task on two launchers",
    r"launch/ray_train\.py": "needs Ray; test_launch_clouds.py types it",
    r"\bvllm serve\b": "needs a GPU; test_integrations_vllm.py serves on the CPU",
    r"benchmarks/(compare|largest|step)\.py": "needs a GPU; test_benchmark_compare.py, _largest and _step type it",
    r"^lightseq train .*(--load_in_4bit|-FP8)": "needs weights of 64 columns; test_four_bits.py trains such",
    r"^axolotl train": "needs axolotl; `make test-axolotl` runs the plugin",
    r"examples/verl/|verl\.trainer": "needs verl; `make test-verl` runs the engine",
    r"--csv docs/\w+\.csv": "takes an hour",
    r"tutorial/prepare\.py": "needs packages from the network",
    r"examples/\w+\.py$": "test_examples.py types it",
    r"^lightseq train --config (qwen3|mine)": "test_recipes.py trains every recipe",
}
# What stands in a typed command for what a page says, in this order. Plans are typed as they are.
TINY = {
    r"openai/gpt-oss-20b": "models/gpt_oss",
    r"Qwen/Qwen3-30B-A3B": "models/qwen3_moe",
    r"Qwen/Qwen3-(0\.6|1\.7|4|8)B\b": "models/qwen3",
    r"Qwen/Qwen3\.5-4B": "models/qwen3_5_text",
    r"MODEL=meta-llama/\S+": 'STAGES="64:1 128:1" CONTEXT=32 MODEL=models/llama',
    r"meta-llama/[\w.-]+": "models/llama",
    r"\b(llama3-8b|llama3\.2-1b)\b": "tiny-llama3",
    r"--data_path docs\b": "--data_path books",
    r"--nnodes=\d+": "--nnodes=1",
    r"node01:29500": "localhost:0",
    r"--nproc_per_node([= ])\d+": r"--nproc_per_node\g<1>2",
    r"--lengths \S+": "--lengths 128,192",
    r"--sample_prompts \S+": r"\g<0> --sample_max_new_tokens 2",
    r"--task needle": "--task needle --trials 1 --choices 2 --depths 0,1",
    r"--(length|model_max_length) \S+": r"--\1 128",
    r"--vocab_size \d+": f"--vocab_size {VOCABULARY}",
    r"--max_steps \d+": "--max_steps 4",
    r"\bcheckpoint-\d+": "checkpoint-4",
    r"--(save|eval|warmup)_steps \d+": r"--\1_steps 2",
    r"--profile_steps \d+:\d+": "--profile_steps 3:3",
    r"^lightseq train (?!.*--(max_steps|config) )": "lightseq train --max_steps 4 ",
    r"^make train": 'make train PYTHON="$PYTHON" STEPS=4 LENGTH=64 BATCH=2',
    r"launch/sweep\.py .*tiny\.yaml$": r"\g<0> --set max_steps=2 --set length=64",
    r'--set "length=\[128,256\]"': "--set length=64",
}
# Results that a page takes as given, or that a command above made: name in the folder, and what makes it.
GIVEN = {
    "outputs/step.jsonl": "benchmarks/results/step-1b-h100.jsonl",
    "outputs/largest.jsonl": "benchmarks/results/largest-h200.jsonl",
}
MAKES_BOOKS = ("README.md", "data.md")  # pages whose own command makes data/books
SENTENCE = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. "


def why_not(line: str) -> str | None:
    """Returns the reason why a command is not typed."""
    return next((reason for pattern, reason in NOT_TYPED.items() if re.search(pattern, line)), None)


def at_tiny_scale(line: str) -> str:
    is_plan = line.startswith("lightseq plan")
    for pattern, tiny in TINY.items():
        if not is_plan or tiny.startswith("models/"):
            line = re.sub(pattern, tiny, line)
    return line


def test_every_exception_and_stand_in_is_of_a_command_on_a_page() -> None:
    lines = [line for page in GUIDES for line in command_lines(page)]
    typed = [line for line in lines if why_not(line) is None]
    assert len(typed) > 75
    assert not [pattern for pattern in NOT_TYPED if not any(re.search(pattern, line) for line in lines)]
    assert not [pattern for pattern in TINY if not any(re.search(pattern, line) for line in typed)]


def make_model(folder: Path, model_type: str) -> None:
    config = tiny_config(model_type, vocab_size=VOCABULARY)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_level().backend.save_pretrained(folder)


def prepare(folder: Path) -> None:
    """Makes a checkout with the models, texts and rows that pages assume."""
    for name in OURS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    for name in ("README.md", "Makefile"):
        shutil.copy(ROOT / name, folder)
    for model_type in ("llama", "gpt_oss", "qwen3", "qwen3_moe", "qwen3_5_text"):
        make_model(folder / "models" / model_type, model_type)
    turns = [{"role": "user", "content": "Who is there?"}, {"role": "assistant", "content": "Nay, answer me."}]
    for name in ("chats", "held-out"):
        (folder / f"{name}.jsonl").write_text(4 * (json.dumps({"messages": turns}) + "\n"))
    pair = {"prompt": "Who is", "chosen": " there?", "rejected": " it?"}
    (folder / "pairs.jsonl").write_text(4 * (json.dumps(pair) + "\n"))
    for name in ("books", "data/tutorial/train", "data/tutorial/held-out"):
        (folder / name).mkdir(parents=True)
        for number in range(6):
            (folder / name / f"{number}.txt").write_text((number + 5) * SENTENCE)
    shutil.copytree(folder / "models" / "llama", folder / "data" / "tutorial" / "model")
    for name, tokenizer in (("stdlib", "byte"), ("held-out", "models/llama")):
        type_command(f"python3 -m data_gen text books --tokenizer {tokenizer} --output data/{name}", folder)


VARIABLES = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def type_command(line: str, folder: Path) -> None:
    """Runs a line in a folder, and fails with what it printed."""
    program = program_alone(line)
    if program is not None:
        done = forked.start(program, folder.parent, "typed", VARIABLES, folder).end(time.monotonic() + 600)
    else:
        done = in_shell(line, folder)
    unfit = line.startswith("lightseq plan") and done.returncode == 1  # a plan that does not fit
    assert done.returncode == 0 or unfit, f"{line}\n{done.stdout}{done.stderr}"


def program_alone(line: str) -> str | None:
    """Returns what follows `python3` if a line is one program in one process, which need not wait for imports."""
    if re.search(r"[*|;&<>$]|nproc_per_node|max_restarts|torch\.distributed|sweep\.py", line):
        return None
    (command,) = split(line)
    return shlex.join(command.program) if command.words[0] in ("lightseq", "python3") else None


def in_shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    tools = folder.parent / "bin"
    tools.mkdir(exist_ok=True)
    for name, words in {"python3": "", "lightseq": "-m lightseq", "torchrun": "-m torch.distributed.run"}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (tools / name).chmod(0o755)
    paths = {"HOME": str(folder.parent), "PYTHON": sys.executable, "PATH": f"{tools}:{os.environ['PATH']}"}
    environment = {**os.environ, **VARIABLES, **paths}
    return subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)


def write_files_of(page: Path, folder: Path) -> None:
    """Writes the blocks of flags on a page whose first line names a file, at tiny scale."""
    for name, text in re.findall(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```", page.read_text(), flags=re.M | re.S):
        tiny = re.sub(r"max_steps: \d+", "max_steps: 4", re.sub(r"(model_max_length): \S+", r"\1: 128", text))
        (folder / name).write_text(at_tiny_scale(tiny))


def give(page: Path, prepared: Path, folder: Path) -> None:
    """Copies the checkout, and adds what a page takes as given."""
    shutil.copytree(prepared, folder)
    for name, source in GIVEN.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(folder / source, folder / name)
    if page.name not in MAKES_BOOKS:
        shutil.copytree(folder / "data" / "held-out", folder / "data" / "books")
    write_files_of(page, folder)


TYPED_PAGES = [page for page in GUIDES if any(why_not(line) is None for line in command_lines(page))]
AT_ONCE = 2  # pages, because a program waits for imports most of the time
ALONE = (
    "make train",
    "lightseq plan",
    "lightseq schedule",
    "lightseq verify",
)  # no other command needs what they write


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """Types the commands of all pages. Returns what the first that failed printed, by page."""
    base, typed = tmp_path_factory.mktemp("typed"), set[str]()
    prepare(base / "all" / "lightseq")

    def type_page(page: Path) -> str:
        folder = base / page.parent.name / page.stem / "lightseq"
        give(page, base / "all" / "lightseq", folder)
        for line in map(at_tiny_scale, filter(lambda line: why_not(line) is None, command_lines(page))):
            if line in typed and line.startswith(ALONE):
                continue
            typed.add(line)
            try:
                type_command(line, folder)
            except AssertionError as failure:
                return str(failure)
        shutil.rmtree(folder)
        return ""

    longest_first = sorted(TYPED_PAGES, key=lambda page: -len(command_lines(page)))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(longest_first, pool.map(type_page, longest_first), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", TYPED_PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_do_what_it_says(page: Path, failures: dict[Path, str]) -> None:
    assert not failures[page]
