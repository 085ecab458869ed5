"""Linear layers in FP8: which ones, on which hardware, and that training with the rounding emulated stays on course."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from programs import Ended, program
from small import CONFIG, losses, words, write_inputs
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from worlds import spawn

from lightseq import parallelize
from lightseq.architecture.flops import matrix_sizes
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.parallel_dims import parallel_dims
from lightseq.distributed.world import World
from lightseq.memory.recomputation import MemorySettings
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.fp8 import check_fp8, check_hardware, to_fp8
from lightseq.training import inputs, step_stats
from lightseq.training.metrics import read_records

float8_linear = pytest.importorskip("torchao.float8.float8_linear")
STEPS = 16


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("fp8"))


def run(rank: int, runs: list[str]) -> list[Ended]:
    """Programs one after the other, as if this machine had FP8 cores of four FLOP/s, and of two in bfloat16."""
    step_stats.peak_flops_per_second = lambda device, fp8=False: 4.0 if fp8 else 2.0  # type: ignore[assignment]
    inputs.check_fp8 = lambda *_: None  # type: ignore[assignment]
    parallelize.to_fp8 = lambda layers, recipe, emulate, tokens: to_fp8(layers, recipe, True, tokens)
    return [program(rank, "llama3", line) for line in runs]


@pytest.mark.slow
def test_losses_with_emulated_fp8_stay_with_bfloat16_and_the_model_is_saved_as_any_other(files: Path) -> None:
    common = f"--bf16 --max_steps {STEPS}"
    runs = [
        words(files, "bf16", common),
        *(words(files, recipe, f"{common} --fp8 {recipe} --fp8_emulate") for recipe in ("tensorwise", "rowwise")),
        words(files, "cores", f"{common} --fp8 rowwise --max_steps 1 --save_strategy no"),
    ]
    ends = spawn(2, run, runs)
    assert [end.status for rank_ends in ends for end in rank_ends] == [0] * 8, ends[0][-1].err
    for output, peak in (("bf16", 2.0), ("rowwise", 2.0), ("cores", 4.0)):
        record = read_records(files / output / "metrics.jsonl")[0]
        assert record["mfu"] == pytest.approx(record["model_tflops_per_gpu"] * 1e12 / peak), output
    assert "linear layers in FP8 (rowwise), " in ends[0][3].out and "without --torch_compile, casts" in ends[0][3].out
    assert "linear layers in FP8 (tensorwise, emulated)" in ends[0][1].out
    bf16 = losses(files, "bf16")
    assert min(bf16) < bf16[0] - 1
    for recipe in ("tensorwise", "rowwise"):
        assert losses(files, recipe) == pytest.approx(bf16, rel=0.02)
        assert losses(files, recipe) != bf16
        facts = json.loads((files / recipe / "run.json").read_text())
        opened = AutoModelForCausalLM.from_pretrained(files / recipe / f"checkpoint-{STEPS}")
        assert opened.dtype == torch.bfloat16 and type(opened.model.layers[0].mlp.up_proj) is torch.nn.Linear
        assert (facts["fp8"], facts["fp8_emulated"]) == (recipe, True) and "torchao" in facts["versions"]


@pytest.mark.parametrize(("local_tokens", "padded"), [(24, True), (32, False)])
def test_the_layers_linears_change_and_nothing_else(local_tokens: int, padded: bool) -> None:
    model = build_to_train(CONFIG)
    before = [name for name, _ in model.named_parameters()]
    to_fp8(model.model.layers, "rowwise", False, local_tokens)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert len(linears) == 7 + 1 and type(linears.pop("lm_head")) is torch.nn.Linear
    for linear in linears.values():
        assert isinstance(linear, float8_linear.Float8Linear) and not linear.config.emulate
        assert linear.config.pad_inner_dim is padded
    assert [name for name, _ in model.named_parameters()] == before


def gradients(rank: int, recipe: str, kind: str, hidden: int, tokens: int) -> list[tuple[str, float]]:
    """Returns the relative L2 distance of each gradient between a compiled, recomputed step and an eager one."""
    device = torch.device(kind)
    world = World(0, 1, 0, 1, device)
    dims, found = parallel_dims(world, 1), []
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, vocab_size=512,
    )  # fmt: skip
    for compiled in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(device)
        asked = TrainConfig(
            model_name_or_path="m", data_path="d", output_dir="o", model_max_length=tokens, bf16=True, fp8=recipe,
            fp8_emulate=kind == "cpu", torch_compile=compiled,
        )  # fmt: skip
        loss_model = parallelize.parallelize(model, asked, dims, MemorySettings()).loss_model
        ids = torch.randint(0, 512, (1, tokens), device=device)
        (loss_model(ids, torch.arange(tokens, device=device)[None], ids.roll(-1, 1)) / tokens).backward()
        found.append({name: p.grad.to_local() for name, p in model.named_parameters()})  # type: ignore[union-attr]
    eager, ours = found
    return [(name, ((ours[name] - g).norm() / g.norm()).item()) for name, g in eager.items()]


ON_GPU = pytest.param("cuda", 2048, 2048, marks=pytest.mark.gpu(1))
ON_CPU = pytest.param("cpu", 128, 64, marks=pytest.mark.slow)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(("kind", "hidden", "tokens"), [ON_GPU, ON_CPU])
def test_compiled_layers_recompute_the_queries_and_keys_that_they_had(
    recipe: str, kind: str, hidden: int, tokens: int
) -> None:
    off = spawn(1, gradients, recipe, kind, hidden, tokens, device=kind)[0]
    assert all(distance < 0.1 for _, distance in off), off


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_hardware_without_fp8_or_rowwise_kernels_is_refused_by_name(recipe: str) -> None:
    for name, capability in (("NVIDIA L40S", (8, 9)), ("NVIDIA H200", (9, 0)), ("NVIDIA B200", (10, 0))):
        check_hardware(recipe, name, capability)
    with pytest.raises(ValueError, match=f"--fp8 {recipe} needs .* 8.9 or newer, but NVIDIA A100 has no FP8; leave it"):
        check_hardware(recipe, "NVIDIA A100", (8, 0))
    fails = recipe == "rowwise"
    with pytest.raises(ValueError, match="kernel for NVIDIA RTX PRO 6000; use --fp8 ten") if fails else nullcontext():
        check_hardware(recipe, "NVIDIA RTX PRO 6000", (12, 0))


def test_sizes_that_the_kernels_do_not_take_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("lightseq.parts.fp8.check_hardware", lambda *_: None)
    odd = LlamaConfig(**CONFIG.to_dict() | {"intermediate_size": 200})
    check_fp8("tensorwise", False, matrix_sizes(CONFIG), cpu)
    check_fp8("tensorwise", True, matrix_sizes(odd), cpu)
    check_fp8(None, False, matrix_sizes(odd), cpu)
    with pytest.raises(ValueError, match="intermediate_size 200 is not a multiple of 16; leave --fp8 out"):
        check_fp8("tensorwise", False, matrix_sizes(odd), cpu)
    monkeypatch.setattr("lightseq.parts.fp8.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed; pip install torchao"):
        check_fp8("tensorwise", True, matrix_sizes(CONFIG), cpu)
