"""The command line: what it accepts, what it refuses and in which words."""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import refusal

from lightseq.cli import COMMANDS
from lightseq.cli import main as lightseq_main
from lightseq.config.choices import CHOICES
from lightseq.config.command_line import help_text, launcher_flags_in_file, launcher_flags_note, parse
from lightseq.config.flag_names import FLAGS_OF_OTHER_PROGRAMS, REMEDIES
from lightseq.config.train_config import TrainConfig, flag_types, warmup_steps
from lightseq.distributed.start_over import LAUNCH

PROGRAM = "llama3/train.py"
REQUIRED = "--model_name_or_path tiny-llama3 --data_path data.pkl --output_dir outputs"
ORIGINAL = """--model_name_or_path winglian/Llama-2-3b-hf --data_path data.pkl --fp16 --output_dir outputs
    --num_train_epochs 3 --per_device_train_batch_size 1 --per_device_eval_batch_size 1
    --gradient_accumulation_steps 1 --evaluation_strategy no --save_strategy steps --save_steps 1000
    --save_total_limit 1 --learning_rate 2e-5 --weight_decay 0. --warmup_ratio 0.03 --lr_scheduler_type "cosine"
    --logging_steps 1 --fsdp "full_shard auto_wrap" --fsdp_transformer_layer_cls_to_wrap 'LlamaDecoderLayer'
    --tf32 False --model_max_length 2048 --gradient_checkpointing True --lazy_preprocess True"""


def given(words: str) -> TrainConfig:
    return parse(shlex.split(f"{REQUIRED} {words}"), PROGRAM)


def test_the_command_line_of_the_original_experiments_parses() -> None:
    config = parse(shlex.split(ORIGINAL), PROGRAM)
    assert (config.model_name_or_path, config.data_path) == ("winglian/Llama-2-3b-hf", "data.pkl")
    assert (config.compute_dtype, config.tf32, config.lazy_preprocess) == ("float16", False, True)
    assert (config.eval_strategy, config.save_strategy, config.save_steps) == ("no", "steps", 1000)
    assert (config.fsdp_mode, config.remat_policy) == ("full_shard", "attention")
    assert (config.learning_rate, config.warmup_ratio, config.lr_scheduler_type) == (2e-5, 0.03, "cosine")


def test_every_flag_has_a_help_line_and_every_help_line_a_flag() -> None:
    shown = [line.split()[0].removeprefix("--") for line in help_text(PROGRAM).splitlines() if line.startswith("  --")]
    assert sorted(shown) == sorted({"config", *(field.name for field in dataclasses.fields(TrainConfig))})


def test_help_is_grouped_and_shows_choices_defaults_and_required_flags() -> None:
    text = help_text(PROGRAM)
    titles = [line for line in text.splitlines() if line and not line.startswith((" ", "usage"))]
    assert titles == ["model:", "data:", "training:", "adapters:", "parallelism:", "memory:", "logging:"]
    assert "choices: auto, ring, striped, zigzag, balanced, prefix, ulysses, usp; default: auto" in " ".join(
        text.split()
    )
    assert text.count("[required]") == 3 and help_text("verify", "Needs a model only.").count("[required]") == 1


def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(map(len, help_text("verify", "What it does. " * 20).splitlines())) <= columns


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["schedule", "--ranks", "2"], "arguments are required: --schedule; lightseq schedule --help lists the flags"),
        (["nonsense", "--ranks", "2"], "unknown command 'nonsense'; choose one of train, "),
        ([], "no command given; "),
        (["rehearse", "--model_name_or_path", "m"], "rehearse was removed; plan predicts whether a run fits, and "),
    ],
)
def test_what_no_command_takes_is_one_line(words: list[str], line: str) -> None:
    said = refusal(lightseq_main, *words)
    assert said.startswith("error: ") and line in said


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert lightseq_main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: lightseq COMMAND ") and all(f"  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("bf16", "", False),
        ("bf16", "--bf16", True),
        ("bf16", "--bf16 True", True),
        ("bf16", "--bf16 false", False),
        ("remat_policy", "", "attention"),
        ("remat_policy", "--gradient_checkpointing True", "attention"),
        ("remat_policy", "--gradient_checkpointing False", "none"),
        ("remat_policy", "--remat full", "full"),
        ("remat_policy", "--remat none --gradient_checkpointing False", "none"),
        ("fsdp_mode", "--fsdp 'full_shard auto_wrap'", "full_shard"),
        ("fsdp_mode", "--fsdp hybrid_shard", "hybrid_shard"),
        ("fsdp_mode", "--fsdp full_shard,auto_wrap", "full_shard"),
        ("fsdp_mode", "--fsdp ''", "ddp"),
        ("kernel_name", "--fused-attention False", "reference"),
        ("kernel_name", "--fused-attention", "auto"),
        ("kernel_name", "--fused_attention True --kernel cudnn", "cudnn"),
        ("resume_from_checkpoint", "--resume_from_checkpoint True", "True"),
        ("resume_from_checkpoint", "--resume_from_checkpoint False", None),
        ("resume_from_checkpoint", "--resume_from_checkpoint out/checkpoint-4", "out/checkpoint-4"),
    ],
)
def test_flags_mean_what_they_say(name: str, words: str, expected: Any) -> None:
    assert getattr(given(words), name) == expected


def test_spans_and_json_arrive_as_values() -> None:
    config = given("""--profile_steps 10:12 --rope_scaling '{"rope_type": "linear", "factor": 4.0}'""")
    assert config.profile_steps == (10, 12)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    assert json.loads(json.dumps(config.to_json())) == config.to_json()
    assert config.to_json()["profile_steps"] == [10, 12]


def test_warm_up_is_given_in_steps_or_as_a_share_rounded_up() -> None:
    assert warmup_steps(given(""), 100) == 0
    assert warmup_steps(given("--warmup_ratio 0.03"), 101) == 4
    assert warmup_steps(given("--warmup_steps 7"), 100) == 7


def test_hyphens_and_older_spellings_name_the_same_flags() -> None:
    hyphens = given("--learning-rate=1e-4 --set-seed 7 --evaluation-strategy no")
    assert hyphens == given("--learning_rate 1e-4 --seed 7 --eval_strategy no")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--fused_attention False --kernel fa4", "--fused_attention False contradicts --kernel fa4; leave one"),
        ("--fused_attention --kernel reference", "--fused_attention True contradicts --kernel reference; leave one"),
        ("--scaling_factor 2", "--scaling_factor 2 applies to --model_name_or_path scaled, not"),
        ("--scaling_strategy n_layers", "--scaling_strategy n_layers applies to --model_name_or_path scaled, not"),
        ("--learning-rat 1e-4", "unknown flag --learning_rat; did you mean --learning_rate?"),
        ("--lenght 4096", "unknown flag --lenght; did you mean --model_max_length?"),
        ("--lr 1e-4", "did you mean --learning_rate?"),
        ("--training.seq_len 4096", "unknown flag --training.seq_len; did you mean --model_max_length?"),
        ("--evaluation_strategi no", "did you mean --evaluation_strategy?"),
        ("--zzz", "unknown flag --zzz; llama3/train.py --help"),
        ("--lora_dropout 0.1", "unknown flag --lora_dropout; adapters have no dropout"),
        ("--fsdp_config f.json", "unknown flag --fsdp_config; did you mean --fsdp?"),
        ("--attn_implementation flash_attention_2", "unknown flag --attn_implementation; did you mean --kernel?"),
        ("stray", "unexpected argument 'stray' without a flag"),
        ("--save_steps", "--save_steps: expected one argument"),
        ("--bf16 maybe", "'maybe' is not a boolean"),
        ("--bf16 --fp16", "--bf16 and --fp16 exclude each other"),
        ("--fp8 e5m2 --bf16", "--fp8 'e5m2' is unknown; choose from tensorwise, rowwise"),
        ("--fp8 rowwise", "--fp8 rowwise needs bfloat16, not float32; add --bf16"),
        ("--fp8 rowwise --fp16", "--fp8 rowwise needs bfloat16, not --fp16; add --bf16"),
        ("--fp8_emulate", "--fp8_emulate True needs --fp8; add it"),
        ("--deepspeed ds.json --fsdp ''", "--deepspeed ds.json and --fsdp '' both shard the weights; give one"),
        ("--deepspeed ds.json --optim adamw_8bit", "--optim adamw_8bit does not run under --deepspeed; use adamw"),
        ("--deepspeed ds.json --fp8 rowwise --bf16", "--fp8 rowwise does not run under --deepspeed; leave one of them"),
        ("--model_max_length 1Z", "1Z is not a number of tokens; write it like 131072, 128K or 1.5M"),
        ("--save_steps 0.5", "'0.5' is not a whole number"),
        ("--learning_rate fast", "'fast' is not a number"),
        ("--learning_rate=-1", "--learning_rate -1.0: give a finite number of at least 0"),
        ("--learning_rate nan", "--learning_rate nan: give a finite number of at least 0"),
        ("--num_train_epochs inf", "--num_train_epochs inf: give a number above 0"),
        ("--max_steps -1", "--max_steps -1: give at least 1, or leave it out"),
        ("--max_steps 9223372036854775807", "--max_steps 9223372036854775807: give at most 1,000,000,000"),
        ("--adam_beta1 1", "--adam_beta1 1.0: give a number from 0 to below 1"),
        ("--optim sgd --adam_beta2 0.95", "--adam_beta2 0.95 applies to AdamW, not to --optim sgd; leave one of them"),
        ("--warmup_ratio 0.1 --warmup_steps 3", "--warmup_ratio 0.1 and --warmup_steps 3 both set the warm-up"),
        ("--warmup_ratio 3", "--warmup_ratio 3.0: give a share"),
        ("--lr_scheduler_type constant --warmup_steps 3", "choose constant_with_warmup"),
        ("--lr_scheduler_type greedy", "--lr_scheduler_type greedy follows the loss instead of the step and is not"),
        ("""--lr_scheduler_kwargs '{"min_lr": NaN}'""", "is not JSON (NaN is not a number); give"),
        ("--lr_scheduler_kwargs 4", """'4' is not a JSON object; give a JSON object such as '{"min_lr_rate": 0.1}'"""),
        ("--fsdp shard_grad_op", "--fsdp shard_grad_op is refused"),
        ("--fsdp 'full_shard offload'", "--fsdp offload is refused"),
        ("--fsdp sharded", "--fsdp 'sharded' is unknown"),
        ("--fsdp auto_wrap", "is unknown; choose from full_shard, hybrid_shard"),
        ("--gradient_checkpointing True --remat none", "True and --remat none contradict each other"),
        ("--eval_strategy steps", "--eval_strategy steps needs data; add --eval_fraction, or --eval_data_path"),
        ("--eval_steps 5", "--eval_steps 5 needs data; add --eval_fraction, or --eval_data_path"),
        ("--eval_data_path gone", "--eval_data_path gone is not used because --eval_strategy is no; add"),
        ("--host_memory_budget 64 --offload none", "limits offloaded activations, but --offload is none; add --"),
        ("--host_memory_budget 64 --offload optimizer", "but --offload is optimizer; add --offload activations"),
        ("--deepspeed d.json --host_memory_budget 64", "--host_memory_budget 64 limits a memory plan, which"),
        ("--torch_compile maybe", "'maybe' is not a boolean; give True or False, or auto for the planner's choice"),
        ("--device_memory_budget 64 --offload both", "applies to --offload auto, but --offload is both; add --offload"),
        ("--layers_per_checkpoint 2 --remat none", "--layers_per_checkpoint 2 recomputes layers, but --remat none"),
        ("--deepspeed d.json --offload both", "set offload_optimizer in d.json, and use --offload activations"),
        ("--tile_layers True --remat none", "--tile_layers recomputes layers, but --remat none was given"),
        ("--tile_layers True --remat attention+mlp", "stores activations of the MLP, which --tile_layers does not"),
        ("--fp8 rowwise --bf16 --remat attention+mlp", "stores activations of the MLP, which --fp8 rowwise does not"),
        ("--tile_layers True --deepspeed d.json", "--tile_layers True does not run under --deepspeed"),
        ("--deepspeed d.json --layers_per_checkpoint 2", "--layers_per_checkpoint 2 does not run under --deepspeed"),
        ("--keep_best True", "--keep_best needs an evaluation at every checkpoint, but --eval_strategy is no and"),
        ("--keep_best True --eval_strategy epoch --eval_data_path d", "is epoch and --save_strategy is steps"),
        (
            "--keep_best True --eval_strategy steps --eval_data_path d --eval_steps 3 --save_steps 10",
            "--save_steps 10 is not a multiple of --eval_steps 3; make it one",
        ),
        ("--eval_fraction 1", "--eval_fraction 1.0: give a share above 0 and below 1, or leave it out"),
        ("--eval_fraction 0.1 --eval_data_path d --eval_strategy steps", "both give evaluation data; give one"),
        ("--eval_fraction 0.1 --max_eval_samples 3", "--max_eval_samples 3 limits --eval_data_path, not --eval_f"),
        ("--early_stopping_patience 2", "--early_stopping_patience 2 needs evaluations; add --eval_fraction, or"),
        ("--early_stopping_threshold 0.1", "--early_stopping_threshold 0.1 needs --early_stopping_patience; add it"),
        ("--early_stopping_patience 2 --eval_fraction 0.1", "needs an evaluation at every checkpoint, but --eval_str"),
        ("--early_stopping_patience 0 --eval_fraction 0.1", "--early_stopping_patience 0: give at least 1, or leave"),
        ("--sample_max_new_tokens 9", "--sample_max_new_tokens 9 needs prompts; add --sample_prompts"),
        ("--profile_steps 10", "'10' is not a range of steps"),
        ("--profile_steps 12:10", "--profile_steps 12:10"),
        ("--profile_memory", "--profile_steps"),
        ("--rope_scaling linear", "'linear' is not JSON"),
        ("--rope_scaling " + "[" * 5000, "is not JSON (maximum recursion depth"),
        ("--rope_scaling [4]", "'[4]' is not a JSON object"),
        ("--packing best_fit --per_device_train_batch_size 2", "which needs batches of one sequence; give 1, and"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line_that_says_what_to_do(words: str, line: str) -> None:
    with pytest.raises(ValueError) as refusal:
        given(words)
    assert line in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("flag", CHOICES)
def test_an_unknown_choice_is_refused(flag: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag} 'nonsense' is unknown; choose from "):
        given(f"--{flag} nonsense")


@pytest.mark.parametrize("flag", ["model_name_or_path", "data_path", "output_dir"])
def test_a_missing_path_is_named(flag: str) -> None:
    words = shlex.split(REQUIRED)
    at = words.index(f"--{flag}")
    with pytest.raises(ValueError, match=f"^--{flag} is missing: "):
        parse(words[:at] + words[at + 2 :], PROGRAM)


def test_parsing_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for words in ("--help", "--nonsense", "--bf16 maybe"):
        with pytest.raises(ValueError):
            given(words)
    assert capfd.readouterr() == ("", "")


def test_flags_are_read_without_torch_and_without_a_file_without_yaml() -> None:
    """Sweeps read the flags of every cell, and torch takes seconds to import."""
    code = f"""import sys
from lightseq.config.command_line import parse
parse({shlex.split(REQUIRED)}, "{PROGRAM}")
sys.exit(bool({{"torch", "transformers", "yaml"}} & sys.modules.keys()))"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- files of flags --------------------------------------------------------------------------------------------------

EVERY_KIND = """
# In plain YAML `no` is False, 10:12 a number of seconds and 2e-5 a string.
random_init: true
save_strategy: no
--learning-rate: 2e-5
evaluation_strategy: no
model_max_length: 128K
fsdp: ""
tokenizer: 007
max_steps:
rope_scaling: {rope_type: yarn, factor: 8.5}
profile_steps: 10:12
"""
GROUPED = """
model: {random_init: true, tokenizer: 007, rope_scaling: '{"rope_type": "yarn", "factor": 8.5}'}
data:
  model_max_length: 131072
training: {learning_rate: 2e-5, max_steps: null}
adapters:
parallelism: {fsdp: ""}
memory: {}
logging: {save_strategy: no, eval_strategy: no, profile_steps: [10, 12]}
"""


def file_of(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", [EVERY_KIND, GROUPED])
def test_a_config_file_equals_its_flags_on_the_command_line(text: str, tmp_path: Path) -> None:
    words = """--random_init --save_strategy no --learning_rate 2e-5 --model_max_length 131072 --fsdp '' --tokenizer 007
        --rope_scaling '{"rope_type": "yarn", "factor": 8.5}' --profile_steps 10:12"""
    assert given(f"--config {file_of(tmp_path, text)}") == given(words)


def test_flags_on_the_command_line_win_over_the_file(tmp_path: Path) -> None:
    path = file_of(tmp_path, "seed: 7\nbf16: true\nlearning_rate: 1e-4\noutput_dir: elsewhere")
    for words in (f"--seed 3 --config {path} --bf16 False", f"--config={path} --bf16=False --seed=3"):
        config = given(words)
        assert (config.seed, config.bf16, config.learning_rate, config.output_dir) == (3, False, 1e-4, "outputs")


def test_a_file_may_give_all_that_is_required(tmp_path: Path) -> None:
    path = file_of(tmp_path, "model_name_or_path: tiny-llama3\ndata_path: data.pkl\noutput_dir: outputs")
    assert parse(["--config", str(path)], PROGRAM) == given("")


@pytest.mark.parametrize("words", ["", "--bf16 --rope_scaling '{\"factor\": 2}' --profile_steps 3:4 --fsdp ''"])
def test_the_config_of_an_earlier_run_is_a_file_of_flags(words: str, tmp_path: Path) -> None:
    config = given(words)
    facts = {"command": "llama3/train.py", "remat": "attention", "config": config.to_json()}
    for name, text in (
        ("run.json", json.dumps(facts)),
        ("flags.json", json.dumps(config.to_json())),
        ("json.yaml", json.dumps(config.to_json())),
        ("run.yaml", yaml.safe_dump(config.to_json())),
    ):
        assert parse(["--config", str(file_of(tmp_path, text, name))], PROGRAM) == config, name


def test_every_flag_of_other_programs_has_one_remedy_and_is_none_of_ours() -> None:
    assert not {*REMEDIES} & {*FLAGS_OF_OTHER_PROGRAMS}
    assert not ({*REMEDIES} | {*FLAGS_OF_OTHER_PROGRAMS}) & flag_types().keys()
    assert {*FLAGS_OF_OTHER_PROGRAMS.values()} <= flag_types().keys()


def test_a_file_may_have_the_flags_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(tmp_path, "seed: 3\nparallelism: {nproc-per-node: 2}\nmax_restarts: 1")
    words = ("--seed", "4", f"--config={path}")
    assert given(" ".join(words)).seed == 4
    assert launcher_flags_in_file(words) == ("--nproc_per_node=2", "--max_restarts=1")
    assert launcher_flags_in_file(["--seed", "4"]) == ()
    assert launcher_flags_note(words, 1) == ()
    monkeypatch.setenv("RANK", "0")
    (note,) = launcher_flags_note(words, 1)
    assert "nproc_per_node 2 and max_restarts 1, but the run started with 1, 0; give --nproc_per_node 2" in note
    monkeypatch.setenv(LAUNCH, "a" * 32)
    assert launcher_flags_note(words, 1) == ()
    with pytest.raises(ValueError, match=r"run.yaml: --nproc_per_node two: give a whole number"):
        launcher_flags_in_file(["--config", str(file_of(tmp_path, "nproc_per_node: two"))])


def test_names_outside_the_plane_of_two_bytes_survive_json(tmp_path: Path) -> None:
    path = file_of(tmp_path, json.dumps({"config": {"tokenizer": "\N{CAT FACE}"}}), "run.json")
    assert given(f"--config {path}").tokenizer == "\N{CAT FACE}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("learning_rat: 1", ": unknown flag --learning_rat; did you mean --learning_rate?"),
        ("training: {learning_rat: 1}", ": unknown flag --learning_rat; did you mean --learning_rate?"),
        ("zzz:", ": zzz has no value; give one, or leave it out"),
        ("datasets: [{path: a, type: b}]", ": unknown flag --datasets; did you mean --data_path?"),
        ("lora_target_linear: true", ": unknown flag --lora_target_linear; adapters go to what --lora_target_modules"),
        ("seed: 1.5", ": --seed: '1.5' is not a whole number"),
        ("seed: true", ": --seed: 'true' is not a whole number"),
        ("seed: [1, 2]", ": seed: ['1', '2'] is not a single value"),
        ("seed:", ": seed has no value; give one, or leave it out"),
        ("data_path: {a: b}", ": data_path: {'a': 'b'} is not a single value"),
        ("training: {bf16: 3}", ": --bf16: '3' is not a boolean"),
        ("learning_rate: fast", ": --learning_rate: 'fast' is not a number"),
        ("rope_scaling: yarn", ": --rope_scaling: 'yarn' is not JSON"),
        ("rope_scaling: &a {x: *a}", " line 1: found unconstructable recursive node"),
        ("profile_steps: 612", ": --profile_steps: '612' is not a range of steps"),
        ("profile_steps: [1, 2, 3]", ": --profile_steps: '1:2:3' is not a range of steps"),
        ("config: other.yaml", ": config names another file; put the flags of other.yaml here"),
        ("memory: 5", ": memory: give `flag: value` lines below it"),
        ("seed: 1\nseed: 2", " line 2: seed is given twice"),
        ("seed: 1\ntraining: {set-seed: 2}", ": seed is given twice; give it once"),
        ("seed: [1", " line 1: expected ',' or ']'"),
        ("{[a]: b}", " line 1: found unhashable key"),
        ("[" * 5000, " is nested too deeply"),
        ("- seed", ": give `flag: value` lines, alone or under model, data, training, adapters"),
        ("", ": give `flag: value` lines, alone or under model"),
        ("seed: \x00", ": unacceptable character"),
        # as run.json
        ("{", " line 1 is not valid JSON (Expecting property name enclosed in double quotes)"),
        ('{"config": [1]}', ": give `flag: value` lines"),
        ('{"config": {"seed": null}}', ": seed has no value"),
        ('{"config": {"schedul": "ring"}}', ": unknown flag --schedul; did you mean --schedule?"),
        ('{"seed": ' + "[" * 5000, " is nested too deeply; give a valid YAML or JSON file"),
        ('{"rope_scaling": ' + '{"a":' * 600 + "1" + "}" * 601, ": rope_scaling is nested too deeply"),
        ('{"seed": ' + "9" * 5000 + "}", ": Exceeds the limit (4300 digits)"),
    ],
)
def test_an_error_in_a_config_file_is_one_line_with_the_file_and_the_key(text: str, line: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, text, "run.json" if text.startswith('{"') or text == "{" else "run.yaml")
    with pytest.raises(ValueError) as refusal:
        given(f"--config {path}")
    assert str(refusal.value).startswith(f"{path}{line}") and "\n" not in str(refusal.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, reason in (
        ("gone.yaml", "cannot be read (No such file or directory)"),
        ("", "cannot be read (Is a directory)"),
        ("binary.yaml", "is not UTF-8 text (byte 0 is 0xff)"),
    ):
        with pytest.raises(ValueError) as refusal:
            given(f"--config {tmp_path / name}")
        assert str(refusal.value) == f"{tmp_path / name} {reason}; give a valid YAML or JSON file"


def test_values_of_a_file_and_of_the_command_line_are_checked_together(tmp_path: Path) -> None:
    path = file_of(tmp_path, "warmup_ratio: 0.1\nbf16: true")
    with pytest.raises(ValueError, match=r"--warmup_ratio 0\.1 and --warmup_steps 3 both set the warm-up"):
        given(f"--config {path} --warmup_steps 3")
    assert given(f"--config {path} --warmup_steps 3 --warmup_ratio 0").warmup_steps == 3


def test_none_takes_a_flag_of_a_file_back(tmp_path: Path) -> None:
    file = file_of(tmp_path, "eval_fraction: 0.1\nmax_steps: 5\n")
    assert given(f"--config {file}").eval_fraction == 0.1
    found = given(f"--config {file} --eval_fraction none")
    assert found.eval_fraction is None and found.max_steps == 5
