"""Nothing that a run reads is executed, leads out of its folder, or is written down where it is a secret."""

import ast
import json
import os
import pickle
import re
import resource
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_pickles import Hostile
from torch.distributed.checkpoint import metadata
from transformers import LlamaConfig, LlamaForCausalLM

from lightseq.architecture.family import resolve
from lightseq.checkpoint import tensor_index
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.environment import cache_compiled_kernels
from lightseq.models import weights
from lightseq.models.presets import ModelFamily
from lightseq.models.weight_files import INDEX, WEIGHTS
from lightseq.training.metrics import RUN, write_run
from lightseq.utils.masking import is_secret_name, mask_secrets

ROOT = Path(__file__).resolve().parent.parent
TINY = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2,
)  # fmt: skip
PROGRAM_FOLDERS = ("lightseq", "llama2", "llama3", "data_gen", "launch", "analysis", "benchmarks", "examples")
# Whoever unpickles does it with a reader that builds what is listed there and nothing else.
UNPICKLERS = {"lightseq/utils/pickles.py"}


@cache
def calls() -> list[tuple[str, ast.Call, str]]:
    """File, call and what is called, of every program."""
    found = []
    for folder in PROGRAM_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    found.append((path.relative_to(ROOT).as_posix(), node, ast.unparse(node.func)))
    return found


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), None)


def test_no_program_unpickles_or_evaluates_what_it_reads() -> None:
    forbidden = re.compile(
        r"(c?[pP]ickle|dill|joblib|shelve|marshal)\.loads?|eval|exec|os\.system|os\.popen|yaml\.load_all"
    )
    found = [f"{file}: {called}" for file, _, called in calls() if forbidden.fullmatch(called)]
    assert not found, found
    unrestricted = [
        f"{file}: {called}"
        for file, call, called in calls()
        if (called == "torch.load" and keyword(call, "weights_only") != "True")
        or (called in ("np.load", "numpy.load") and keyword(call, "allow_pickle") not in (None, "False"))
        or (called.endswith("Unpickler") and file not in UNPICKLERS)
        or (called == "dcp.load" and keyword(call, "storage_reader") is None)
        or called in ("FileSystemReader", "dcp.FileSystemReader")
    ]
    assert not unrestricted, unrestricted


def test_no_program_hands_a_string_to_a_shell() -> None:
    assert not [f"{file}: {called}" for file, call, called in calls() if keyword(call, "shell") not in (None, "False")]
    for script in [*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/slurm/*"), ROOT / ".ci" / "run"]:
        words = re.findall(r"(?m)^[^#\n]*?(?:\beval\b|\b(?:ba)?sh -c|`)", script.read_text())
        assert not words, (script, words)


def test_code_that_ships_with_a_model_is_refused_everywhere() -> None:
    trusted = [f"{f}: {c}" for f, call, c in calls() if keyword(call, "trust_remote_code") not in (None, "False")]
    assert not trusted
    unsaid = [
        f"{file}: {called}"
        for file, call, called in calls()
        if called in ("AutoConfig.from_pretrained", "AutoTokenizer.from_pretrained")
        and keyword(call, "trust_remote_code") != "False"
        and not file.startswith("benchmarks/")
    ]
    assert not unsaid, unsaid


def test_a_config_that_names_code_runs_none_and_asks_nothing(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="its config cannot be read"):
        resolve(ModelFamily("llama3", {}, {}), str(tmp_path), random_init=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("elsewhere", ["../secret.bin", "/etc/secret.bin", "a/../../secret.bin", "secret.bin"])
def test_an_index_of_weights_names_no_file_elsewhere(tmp_path: Path, elsewhere: str) -> None:
    model = LlamaForCausalLM(TINY)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / WEIGHTS).rename(tmp_path / "secret.bin")
    names = dict.fromkeys((name for name, _ in model.named_parameters()), elsewhere)
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ValueError, match=r"names .*secret\.bin, which is missing"):
        weights.load_or_refuse(LlamaForCausalLM(TINY), tmp_path / "model", "--model_name_or_path")


PICKLE_ERRORS = [
    "[]", "null", "{}", '{"weight_map": []}', '{"weight_map": {"lm_head.weight": 3}}', '{"weight_map": {"a": null}}',
    "[" * 100_000, '{"weight_map": {"a": "a\\u0000b"}}',
]  # fmt: skip


@pytest.mark.parametrize("text", PICKLE_ERRORS, ids=lambda text: text[:30])
def test_a_malformed_index_of_weights_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=str(tmp_path)):
        weights.load_or_refuse(LlamaForCausalLM(TINY), tmp_path, "--model_name_or_path")


SECRETS = {
    "hub token": "hf_" + "abcdefgh" * 4,
    "key": "sk-" + "abcdefgh" * 4,
    "GitHub": "ghp_" + "abcdefgh" * 4,
    "AWS": "AKIA" + "ABCDEFGH" * 2,
    "in the environment": "correct horse battery",
}


def test_no_secret_is_written_down(tmp_path: Path) -> None:
    known = (SECRETS["in the environment"],)
    command = " ".join(f"--tokenizer x{secret}y --auth_token=hunter2-{i}" for i, secret in enumerate(SECRETS.values()))
    facts = {
        "command": command.replace("xhf_", "hf_").replace("xsk", "sk").replace("xghp", "ghp"),
        "config": {"model_name_or_path": "https://ada:lovelace-1815@host/model", "notes": list(SECRETS.values())},
        "deepspeed": {"wandb": {"api_key": "short", "team": "engine"}, "password": ""},
        "model_config": {"bos_token_id": 1, "bos_token": "<s>", "tokenizer": "byte", "max_tokens": 12},
    }
    write_run(tmp_path, facts, known)
    text = (tmp_path / RUN).read_text()
    hidden = ["hunter2", "lovelace-1815", '"short"', *(secret for name, secret in SECRETS.items() if name != "AWS")]
    assert not [secret for secret in hidden if secret in text], text
    run = json.loads(text)
    assert run["model_config"] == facts["model_config"] and run["deepspeed"]["wandb"]["team"] == "engine"
    assert run["config"]["model_name_or_path"] == "https://***@host/model" and run["config"]["notes"][3] == "***"


@pytest.mark.parametrize("name", ["OPENAI_KEY", "DB_PASS", "PGPASSWORD", "SSH_PASSPHRASE", "APIKEY", "pass"])
def test_a_name_tells_a_secret(name: str) -> None:
    assert is_secret_name(name) and mask_secrets({name: "x"}) == {name: "***"}
    assert mask_secrets(f"curl --{name} hunter2") == f"curl --{name} ***"


def test_values_that_are_no_secret_stay() -> None:
    words = "--model_name_or_path meta-llama/Llama-3.2-1B --tokenizer byte --output_dir outputs/sk-learn --seed 42"
    assert not [name for name in ("BYPASS", "compass", "MONKEY", "tokens") if is_secret_name(name)]
    assert mask_secrets(words) == words and mask_secrets({"valid_tokens": "3", "eos_token": "</s>"}) == {
        "valid_tokens": "3",
        "eos_token": "</s>",
    }


def test_a_checkpoint_keeps_no_secret_of_its_flags() -> None:
    config = TrainConfig(model_name_or_path=SECRETS["hub token"], data_path="d", output_dir="o")
    assert SECRETS["hub token"] not in json.dumps(config.to_json())


def test_deepspeed_files_build_nothing_strange(tmp_path: Path) -> None:
    from lightseq.training.deepspeed_engine import check_harmless

    torch.save({"module": torch.zeros(2), "extra": Hostile(tmp_path / "ran")}, tmp_path / "states.pt")
    with pytest.raises(ValueError, match=r"contains \w+\.system"):
        check_harmless(tmp_path)
    (tmp_path / "states.pt").write_bytes(b"\x80\x04cposix\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match="cannot be read"):
        check_harmless(tmp_path)
    torch.save({"module": torch.zeros(2)}, tmp_path / "states.pt")
    check_harmless(tmp_path)
    assert not (tmp_path / "ran").exists()


def zipped_pickle(path: Path, content: bytes) -> Path:
    """A file of torch.save that holds a pickle."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as old:
        files = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in files.items():
            new.writestr(name, content if name.endswith("data.pkl") else data)
    return path


def test_deepspeed_files_change_no_class_and_cost_no_memory(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    from lightseq.training.deepspeed_engine import check_harmless, load_restricted

    # BUILD with the state (None, {...}) sets attributes of what lies below it, here of a class.
    named = b"\x80\x02cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n"
    path = zipped_pickle(tmp_path / "states.pt", named + b"N}X\x07\0\0\0plantedX\x03\0\0\0yess\x86b.")
    with pytest.raises(ValueError, match="cannot be read"):
        load_restricted(str(path))
    assert not hasattr(LossScaler, "planted")
    path = zipped_pickle(tmp_path / "states.pt", b"\x80\x02}r\xff\xff\xff\xff.")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert load_restricted(str(path)) == {}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB
    torch.save({"scaler": LossScaler(2.0)}, path)
    check_harmless(tmp_path)
    assert load_restricted(str(path))["scaler"].cur_scale == 2.0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="linked is a link"):
        check_harmless(tmp_path)


class _Getting:
    """Pickles as getattr(of, name)."""

    def __init__(self, of: object, name: str) -> None:
        self._asked = of, name

    def __reduce__(self) -> Any:
        return getattr, self._asked


@pytest.mark.parametrize(
    ("of", "name", "line"),
    [
        (metadata._MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT", "is not a tensor index: expected a"),
        (metadata._MEM_FORMAT_ENCODING, "mro", "is not a tensor index: expected a"),
        (metadata.Metadata, "__init__", "is not a tensor index: expected a"),
    ],
)
def test_an_index_gets_no_attribute_but_the_name_of_a_memory_format(
    tmp_path: Path, of: object, name: str, line: str
) -> None:
    """Python 3.11.2 pickles members of an enum so, 3.11.7 does not."""
    (tmp_path / tensor_index.INDEX).write_bytes(pickle.dumps(_Getting(of, name)))
    with pytest.raises(ValueError, match=line):
        tensor_index.read_index(tmp_path)


CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor-",
    "TRITON_CACHE_DIR": "triton",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "fa4",
}
CACHE_SETTINGS = ("LIGHTSEQ_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", *CACHES)


@pytest.fixture
def unset_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, with an empty temp directory beside it, and no setting of a cache. Returns the temp directory."""
    for name in CACHE_SETTINGS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    temporary = tmp_path / "temporary"
    for folder in (temporary, tmp_path / "home"):
        folder.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(temporary))
    return temporary


def folder_of_caches() -> Path | None:
    """Calls `cache_compiled_kernels`. Returns the one folder that all libraries cache in; None if none was set."""
    cache_compiled_kernels()
    found = {name: os.environ.get(name) for name in CACHES}
    if not any(found.values()):
        assert "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED" not in os.environ
        return None
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    folders = {Path(str(found[name])).parent for name in CACHES}
    assert all(Path(str(found[name])).name.startswith(CACHES[name]) for name in CACHES)
    assert len(folders) == 1
    return folders.pop()


def test_compiled_kernels_are_cached_in_the_home(unset_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of_caches()
    assert folder == Path.home().resolve() / ".cache/lightseq/kernels"
    for made in (folder, *list(folder.parents)[:2]):
        assert made.stat().st_mode & 0o777 == 0o700
    assert not list(unset_caches.iterdir())


@pytest.mark.parametrize("planted", ["a file in its place", "open to all", "a parent open to all"])
def test_without_a_safe_home_kernels_are_cached_in_the_temp_directory(unset_caches: Path, planted: str) -> None:
    home = Path.home() / ".cache/lightseq"
    if planted == "a file in its place":
        home.parent.write_text("")
    else:
        home.mkdir(parents=True)
        folder = home.parent if planted == "a parent open to all" else home
        folder.chmod(0o777)
    folder = folder_of_caches()
    assert folder == unset_caches / f"lightseq-{os.getuid()}" and folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("planted", ["a link", "open to all", "another's", "where all may rename", "no folder"])
def test_the_kernel_cache_is_writable_by_its_user_only(
    planted: str, unset_caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path.home().chmod(0o777)
    folder = unset_caches / f"lightseq-{os.getuid()}"
    if planted == "a link":
        (unset_caches / "theirs").mkdir(mode=0o700)
        folder.symlink_to(unset_caches / "theirs")
    elif planted == "open to all":
        folder.mkdir()
        folder.chmod(0o777)
    elif planted == "another's":
        monkeypatch.setattr("os.getuid", lambda: unset_caches.stat().st_uid + 1)
    elif planted == "where all may rename":
        unset_caches.chmod(0o777)
    else:
        (unset_caches / "file").write_text("")
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(unset_caches / "file"))
    assert folder_of_caches() is None


def test_users_place_the_cache_of_compiled_kernels(
    unset_caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path.home() / "disk").mkdir(mode=0o700)
    (Path.home() / "link").symlink_to(Path.home() / "disk")
    monkeypatch.setenv("LIGHTSEQ_CACHE_DIR", "~/link/kernels")
    assert folder_of_caches() == Path.home().resolve() / "disk/kernels" and not capsys.readouterr().err


def test_a_chosen_cache_that_others_can_write_to_is_named_and_not_used(
    unset_caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = unset_caches / "open"
    chosen.mkdir()
    chosen.chmod(0o777)
    monkeypatch.setenv("LIGHTSEQ_CACHE_DIR", str(chosen))
    assert folder_of_caches() is None
    assert f"warning: LIGHTSEQ_CACHE_DIR={chosen} is not used: it must be a folder of yours" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*CACHES, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"])
def test_a_librarys_own_cache_setting_wins(unset_caches: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0")
    cache_compiled_kernels()
    assert os.environ[name] == "0" and all(setting in os.environ for setting in CACHES)
