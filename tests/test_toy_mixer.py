"""A new kind of layer trains through the public seams alone, and matches one process."""

import pickle
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import toy_mixer
from programs import Ended, programs
from small import VOCABULARY, sgd_steps
from test_plan_training import planned_run
from torch import Tensor
from transformers import AutoModelForCausalLM
from worlds import one_process, spawn

from lightseq import hf
from lightseq.architecture.flops import model_flops, recompute_flops
from lightseq.architecture.inspection import inspect_architecture
from lightseq.parts import recurrences as mixers
from lightseq.parts.facts import Attention, LinearMixer, distinct
from lightseq.parts.recurrences import MixerKind, mixer_modules, register_mixer
from lightseq.plan.plan import plan_as_given
from lightseq.training.metrics import read_records

RATE, STEPS = 0.1, 2
LENGTHS = (5, 13, 2, 9)  # of documents
ROWS = [[(3 + 5 * i + 7 * length) % VOCABULARY for i in range(length)] for length in LENGTHS]
WHOLE = [token for row in ROWS for token in row]
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    torch.manual_seed(1)
    model = toy_mixer.ToyForCausalLM(toy_mixer.ToyConfig(**SIZES))
    for layer in model.model.layers[1::2]:
        torch.nn.init.uniform_(layer.self_attn.weight, 0.5, 2.0)
    model.save_pretrained(folder / "model")
    (folder / "whole.pkl").write_bytes(pickle.dumps({"input_ids": [WHOLE] * 8}))
    (folder / "packed.pkl").write_bytes(pickle.dumps({"input_ids": ROWS}))
    return folder


def plain_steps(files: Path, batches: list[list[list[int]]]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of transformers' own training, document by document."""
    model = AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32)
    return sgd_steps(model, batches, RATE), model.state_dict()


def train(rank: int, lines: list[str]) -> list[Ended]:
    """Programs on this rank, to which this module has made the model known."""
    return programs(rank, "any", lines)


@pytest.mark.parametrize(
    ("world", "data", "more"),
    [
        pytest.param(1, "whole", "--remat attention", marks=pytest.mark.slow),
        pytest.param(2, "whole", "--remat none --torch_compile", marks=pytest.mark.slow),
        (2, "packed", "--remat full"),
        pytest.param(3, "whole", "--remat full --layers_per_checkpoint 2", marks=pytest.mark.slow),
        pytest.param(2, "whole", "--remat attention --torch_compile", marks=pytest.mark.slow),
        pytest.param(3, "packed", "--remat attention --schedule balanced", marks=pytest.mark.slow),
        pytest.param(3, "packed", "--remat none --torch_compile", marks=pytest.mark.slow),
    ],
)
def test_it_trains_resumes_and_saves_like_one_process(world: int, data: str, more: str, files: Path) -> None:
    name = f"{world}-{data}-{'-'.join(more.replace('--', '').split())}"
    packing = f"--packing best_fit --model_max_length {sum(LENGTHS)}" if data == "packed" else "--model_max_length 40"
    words = (
        f"--model_name_or_path {files}/model --data_path {files}/{data}.pkl --output_dir {files}/{name} {packing} "
        f"--optim sgd --learning_rate {RATE} --lr_scheduler_type constant --weight_decay 0 --max_grad_norm 0 "
        f"--save_steps 1 --logging_steps 1 {more}"
    )
    lines = [f"{words} --max_steps 1", f"{words} --max_steps {STEPS} --resume_from_checkpoint auto"]
    for ends in spawn(world, train, lines):
        assert [end.status for end in ends] == [0, 0], ends[-1].err
    losses, weights = plain_steps(files, [ROWS] * STEPS if data == "packed" else [[WHOLE]] * STEPS)
    records = read_records(files / name / "metrics.jsonl")
    assert [record["loss"] for record in records if "loss" in record] == pytest.approx(losses, rel=1e-5)
    found = AutoModelForCausalLM.from_pretrained(files / name / f"checkpoint-{STEPS}", dtype=torch.float32).state_dict()
    assert found.keys() == weights.keys()
    for key, want in weights.items():
        torch.testing.assert_close(found[key], want, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.slow
def test_it_is_planned_and_counted() -> None:
    config = toy_mixer.ToyConfig(**SIZES)
    layers = inspect_architecture(config).layers
    mixer = LinearMixer("CausalMean", token_flops=4 * 48)
    assert [layer.mixers for layer in layers[:2]] == [(layers[0].attentions[0],), (mixer,)]
    assert isinstance(layers[0].mixers[0], Attention) and [layer.place for layer in distinct(layers)] == [0, 1]
    plain = toy_mixer.ToyConfig(**SIZES | {"num_hidden_layers": 1})
    one, two = (toy_mixer.ToyConfig(**SIZES | {"num_hidden_layers": n}) for n in (1, 2))
    mlp = 3 * 48 * 64
    assert model_flops(two, 16, 1) - model_flops(plain, 16, 1) == 16 * (6 * mlp + 3 * mixer.token_flops)
    again = recompute_flops(two, 16, 1, "attention") - recompute_flops(one, 16, 1, "attention")
    assert again == 16 * (2 * 2 * 48 * 64 + mixer.token_flops)
    run = planned_run(config, "--bf16 --torch_compile --remat none --offload none --model_max_length 32K", 2)
    attending, toy = (run.costs(layer) for layer in distinct(layers))
    # Attention saves q, k, v, out and log-sum-exp, its normed input and what its last linear returns, the mean only
    # the sum over its tokens.
    attention, hidden = 2 * 4 * 48 + 4 * 6, 2 * 48
    assert attending.saved - toy.saved == attention + 2 * hidden - hidden
    assert plan_as_given(run).parts.stored_activations == pytest.approx(run.tokens * 2 * (attending.saved + toy.saved))


def test_enabling_is_undone(files: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32)
    ids = torch.tensor([ROWS[1]])
    before = model(ids).logits
    with one_process():
        context = hf.enable(model)
        batch = hf.shard_batch(context, ids)
        assert type(model.model.layers[1].self_attn) is not toy_mixer.CausalMean
        enabled = model(**batch).logits[:, : ids.shape[1]]
        hf.disable(model)
    assert type(model.model.layers[1].self_attn) is toy_mixer.CausalMean
    assert "sequence_group" not in vars(model.model.layers[1].self_attn)
    torch.testing.assert_close(enabled, before)
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)


def test_a_class_has_one_kind() -> None:
    with pytest.raises(ValueError, match="CausalMean is registered already"):
        register_mixer(MixerKind(toy_mixer.CausalMean, toy_mixer.distributed_mean, toy_mixer.facts, "other"))
    register_mixer(MixerKind(toy_mixer.CausalMean, forward=toy_mixer.distributed_mean, facts=toy_mixer.facts))


def test_facts_follow_a_registration() -> None:
    class OtherMean(toy_mixer.CausalMean):
        pass

    config = toy_mixer.ToyConfig(**SIZES)
    model = toy_mixer.ToyForCausalLM(config)
    model.model.layers[1].self_attn = OtherMean(config)
    before = inspect_architecture(config)
    assert len(mixer_modules(model)) == 1
    with patch.dict(mixers._KINDS):
        register_mixer(MixerKind(OtherMean, toy_mixer.distributed_mean, toy_mixer.facts))
        assert len(mixer_modules(model)) == 2 and inspect_architecture(config) is not before
    assert inspect_architecture(config) is before


def test_a_model_without_attention_is_refused() -> None:
    config = toy_mixer.ToyConfig(**SIZES)
    model = toy_mixer.ToyForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn = toy_mixer.CausalMean(config)
    with pytest.raises(ValueError, match="no layer with softmax attention"), one_process():
        hf.enable(model)
