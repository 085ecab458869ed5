"""Documents packed into sequences: fitted, cut without losing a target, and trained on as if each stood alone."""

import pickle
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from schedules import fitting
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import spawn

import llama3
from lightseq import hf
from lightseq.architecture.family import preset_config
from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import BatchStream, permutation
from lightseq.data.packing import PackedExamples, best_fit, open_packed
from lightseq.data.token_directory import write_token_directory
from lightseq.distributed.world import World
from lightseq.integrations.split_model import TrainerBatches
from lightseq.integrations.whole_batches import WholeBatches
from lightseq.models import random_weights, weights
from lightseq.parts.chosen_experts import build_to_train
from lightseq.schedule.algorithms import SCHEDULES, make_schedule
from lightseq.schedule.documents import balance, packed_schedule
from lightseq.schedule.nodes import Nodes
from lightseq.training.build import build_engine
from lightseq.training.inputs import prepare
from lightseq.training.trainer import Trainer
from lightseq.utils.tensors import IGNORE_INDEX

CPU = torch.device("cpu")
LENGTH, SIZES = 150, (149, 3, 2, 40, 1, 90, 301, 17, 152, 60, 33, 151, 4, 75)  # of documents; four are longer
MODEL = "tiny-llama3"
_runs = count()


def _documents() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 512, size) for size in SIZES]


def _opened(folder: Path, kind: str) -> PackedExamples:
    if kind == "directory":
        path = folder / "tokens"
        if not path.exists():
            write_token_directory(path, _documents(), 512, dict)
    else:
        path = folder / "data.pkl"
        path.write_bytes(pickle.dumps({"input_ids": [x.tolist() for x in _documents()]}))
    return open_packed(path, LENGTH, 512)


# ---- fitting ---------------------------------------------------------------------------------------------------------


def test_each_window_goes_where_it_leaves_least_room() -> None:
    order, first = best_fit(np.array([4, 5, 6, 3, 2]), 10)
    assert (order.tolist(), first.tolist()) == ([2, 0, 1, 3, 4], [0, 2, 5])  # 6 + 4, 5 + 3 + 2


@pytest.mark.parametrize("seed", range(5))
def test_every_window_is_in_one_sequence_and_none_overflows(seed: int) -> None:
    sizes = np.random.default_rng(seed).integers(1, 1001, 3000)
    order, first = best_fit(sizes, 1000)
    assert sorted(order.tolist()) == list(range(3000))
    filled = [int(sizes[order[a:b]].sum()) for a, b in pairwise(first.tolist())]
    assert max(filled) <= 1000 and min(filled) > 0
    assert len(filled) <= 1.05 * sizes.sum() / 1000


@pytest.mark.parametrize("kind", ["directory", "pickle"])
def test_every_target_is_kept_once_in_its_document_and_what_is_cut_is_counted(tmp_path: Path, kind: str) -> None:
    packed, found = _opened(tmp_path, kind), []
    for i in range(len(packed)):
        example = packed[i]
        assert example.boundaries is not None and example.boundaries[-1] == len(example.input_ids) <= LENGTH
        for a, b in pairwise(example.boundaries):
            ids, labels = example.input_ids[a:b], example.labels[a:b]
            assert labels[:-1].tolist() == ids[1:].tolist()
            found += zip(ids.tolist(), labels.tolist(), strict=True)
    pairs = [pair for ids in _documents() for pair in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True)]
    assert sorted(pair for pair in found if pair[1] != IGNORE_INDEX) == sorted(pairs)
    said = " ".join(packed.notes)
    tokens = sum(SIZES) - 1 - 2  # a document of one token has no target, the last of 301 and 151 are targets alone
    assert "of fewer than two tokens" in said and "13 documents packed into 8 sequences" in said
    assert f"{8 * LENGTH - tokens} tokens of padding" in said
    assert "2 documents longer than that split into 4 pieces; no target is lost" in said


def test_padding_of_a_third_of_the_tokens_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "one.pkl"
    for size, warned in ((5, True), (10, True), (11, False)):
        path.write_bytes(pickle.dumps({"input_ids": [list(range(size))]}))
        (note,) = open_packed(path, 16, 61).notes
        assert f"{path}: 1 document packed into 1 sequence of 16 tokens, " in note
        assert (note.startswith("warning: "), note.endswith("%); give a lower --model_max_length")) == (warned, warned)


def test_texts_that_are_tokenized_on_access_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n')
    assert len(open_packed(tmp_path / "a.jsonl", 8, 300, "byte")) == 1
    with pytest.raises(ValueError, match="leave --lazy_preprocess out"):
        open_packed(tmp_path / "a.jsonl", 8, 300, "byte", lazy=True)


def test_a_batch_carries_boundaries_and_one_past_the_end_is_padding(tmp_path: Path) -> None:
    packed = _opened(tmp_path, "pickle")
    stream = BatchStream(packed, LENGTH, 1, data_ranks=3, epochs=1, shuffle=False, packed=True)
    batch = stream.batch(0, 0, 1)
    assert batch.boundaries == packed[1].boundaries and batch.input_ids.shape == (1, LENGTH)
    past = stream.batch(2, 0, 2)
    assert (past.boundaries, past.valid_tokens) == ((0, 1), 0)


# ---- a user's own loop -----------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15,
}  # fmt: skip


def _model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**TINY | changes))


def _loop(rank: int) -> None:
    edges = [0, 1, 3, 100, 131, 200]
    ids = torch.randint(61, (1, 210), generator=torch.Generator().manual_seed(0))  # ten tokens of padding
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise([*edges, 210])])[None]
    labels = ids.clone()
    labels[:, 50:60] = labels[:, 200:] = IGNORE_INDEX
    want = _model()
    targets = sum(int((labels[:, a + 1 : b] != IGNORE_INDEX).sum()) for a, b in pairwise(edges))
    expected = torch.zeros(())
    for a, b in pairwise(edges):
        if b - a > 1:
            logits = want(input_ids=ids[:, a:b]).logits[0, :-1]
            expected = expected + F.cross_entropy(logits, labels[0, a + 1 : b], reduction="sum") / targets
    expected.backward()
    for name in fitting(dist.get_world_size(), 4, 2):
        model = _model()
        context = hf.enable(model, schedule=name)
        batch = hf.shard_batch(context, ids, labels, cu_seqlens=torch.tensor(edges, dtype=torch.int32))
        assert int(batch["num_items_in_batch"]) == targets
        loss = model(**batch).loss
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        assert abs(total - expected) < 1e-5, f"{name}: {total} against {expected}"
        for (parameter, p), q in zip(model.named_parameters(), want.named_parameters(), strict=True):
            dist.all_reduce(p.grad)
            error = (p.grad - q[1].grad).norm() / q[1].grad.norm()
            assert error < 1e-5, f"{name}: gradient of {parameter} off by {error}"
        restarting = hf.shard_batch(context, ids, labels.masked_fill(positions == 0, -100), position_ids=positions)
        assert restarting["documents"].padded_boundaries[:7] == (*edges, 210)
        mixed = batch | {"position_ids": batch["position_ids"] + 1}
        _refused(lambda model=model, mixed=mixed: model(**mixed), "do not match the documents")
        bare = {key: x for key, x in batch.items() if key != "documents"}
        if dist.get_world_size() > 1:
            _refused(lambda model=model, bare=bare: model(**bare), "use shard_batch")


def _refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_packed_documents_in_a_loop_have_the_loss_and_gradients_of_each_alone(world: int) -> None:
    spawn(world, _loop)


def _refusals(rank: int) -> None:
    model = _model()
    context = hf.enable(model)
    two = torch.zeros(2, 8, dtype=torch.int64)
    _refused(lambda: hf.shard_batch(context, two, cu_seqlens=[0, 4, 8]), "packed documents in a batch of 2")
    _refused(lambda: hf.shard_batch(context, two[:1], cu_seqlens=[0, 4, 4, 8]), "0, 4, 4, 8 do not rise from 0")
    _refused(lambda: hf.shard_batch(context, two[:1], cu_seqlens=[0, 4, 9]), "end at token 9 of a sequence of 8")
    for wrong in ([1, 1, 2, 2, 1, 1, 0, 0], [1, 1, 0.5, 0, 0, 0, 0, 0], [1, 1, 1, -4, -4, -4, -4, -4]):
        mask = torch.tensor([wrong])
        _refused(lambda mask=mask: hf.shard_batch(context, two[:1], attention_mask=mask), "^attention_mask (numb|has)")
    numbers = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 0]])
    for given, words in (
        ({"cu_seqlens": [0, 3, 7]}, r"at \[0, 4, 7\], but cu_seqlens are \[0, 3, 7\]"),
        ({"position_ids": torch.arange(8)[None]}, "do not count up from 0"),
        ({"input_ids": two, "attention_mask": numbers.expand(2, -1)}, "has 2 in a batch of 2"),
    ):
        whole = {"input_ids": two[:1], "attention_mask": numbers, **given}
        _refused(lambda whole=whole: hf.shard_batch(context, **whole), words)
    ends = {"cu_seqlens": [0, 4, 7], "input_ids": two[:1]}
    for tail in ({}, {"labels": two[:1]}, {"shift_labels": two[:1]}, {"attention_mask": torch.ones(1, 8)}):
        _refused(lambda tail=tail: hf.shard_batch(context, **ends, **tail), "cu_seqlens end at 7, but .* 8 tokens")
    for padding in ({"labels": two[:1].masked_fill(numbers == 0, -100)}, {"attention_mask": numbers != 0}):
        assert hf.shard_batch(context, **ends, **padding)["documents"].count == 2
    for wrong in ([[0, 1, 2, 0, 1, 3, 0, 1]], [[3, 4, 5, 0, 1, 2, 3, 4]]):
        _refused(
            lambda wrong=wrong: hf.shard_batch(context, two[:1], position_ids=torch.tensor(wrong)),
            "do not count up from 0",
        )
    plain = hf.shard_batch(context, two, position_ids=torch.arange(8).expand(2, -1))
    assert "documents" not in plain
    batch = hf.shard_batch(context, two[:1], cu_seqlens=[0, 4, 8])
    missing = {"input_ids": batch["input_ids"], "documents": batch["documents"]}
    _refused(lambda: model(**missing), "position_ids are missing")
    short = {**batch, "input_ids": batch["input_ids"][:, :4], "position_ids": batch["position_ids"][:, :4]}
    _refused(lambda: model(**short), "do not match the documents")


def test_a_mask_that_numbers_documents_separates_them() -> None:
    spawn(1, _numbered)


def _numbered(rank: int) -> None:
    model = _model()
    context = hf.enable(model)
    ids = torch.arange(8)[None]
    labels, mask = ids.masked_fill(ids == 7, -100), torch.tensor([[1, 1, 1, 1, 2, 2, 2, 0]])
    losses = [
        model(**hf.shard_batch(context, ids, labels, **given)).loss
        for given in (
            {"cu_seqlens": [0, 4, 7]},
            {"attention_mask": mask},
            {"attention_mask": mask, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]])},
            {"attention_mask": mask, "cu_seqlens": [0, 4, 7, 8]},
        )
    ]
    torch.testing.assert_close(torch.stack(losses), losses[0].expand(4))
    whole = WholeBatches(model, context)
    torch.testing.assert_close(model(input_ids=ids, labels=labels, attention_mask=mask).loss, losses[0])
    whole.configure(TrainerBatches(keeps_targets=True, pad_to=12))
    for given in ({"attention_mask": mask}, {"cu_seq_lens_q": torch.tensor([0, 4, 8])}):
        assert model(input_ids=ids, **given).logits.shape[1] == 8


def test_documents_that_cannot_be_honoured_are_refused() -> None:
    spawn(1, _refusals)


def _recompilations(rank: int) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    plain, model = _model(num_hidden_layers=1), _model(num_hidden_layers=1)
    pairs = [(plain, hf.enable(plain, schedule="prefix")), (model, hf.enable(model, schedule="prefix"))]
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=counter)
    ids = torch.randint(61, (1, 96))
    for edges in ([0, 96], [0, 5, 96], [0, 1, 2, 50, 51, 70], [0, *range(1, 97)]):
        labels = ids.clone()
        labels[:, edges[-1] :] = -100
        losses = [m(**hf.shard_batch(c, ids, labels, cu_seqlens=edges)).loss for m, c in pairs]
        grads = [
            torch.autograd.grad(loss, m.model.layers[0].mlp.up_proj.weight)[0]
            for loss, (m, _) in zip(losses, pairs, strict=True)
        ]
        assert torch.allclose(*losses, atol=1e-5) and torch.allclose(*grads, atol=1e-5), edges
    assert counter.frame_count == 1


@pytest.mark.slow
def test_a_compiled_layer_is_not_compiled_again_for_other_documents() -> None:
    spawn(1, _recompilations)


# ---- training --------------------------------------------------------------------------------------------------------


def _reference(folder: str, sequences: int, steps: int) -> list[float]:
    """Plain transformers on one document after the other, in the order in which the stream packs them."""
    model = build_to_train(preset_config(llama3.FAMILY, MODEL))
    weights.materialize(model, CPU)
    random_weights.initialize(model, seed=42)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    packed, losses = open_packed(Path(folder) / "data.pkl", LENGTH, 512), []
    for step in range(steps):
        places = range(step * sequences, (step + 1) * sequences)
        examples = [packed[int(permutation(len(packed), 42, p // len(packed))[p % len(packed)])] for p in places]
        targets = sum(int((example.labels != IGNORE_INDEX).sum()) for example in examples)
        total = 0.0
        for example in examples:
            for a, b in pairwise(example.boundaries or ()):
                ids, labels = (torch.from_numpy(x[a:b]) for x in (example.input_ids, example.labels))
                logits = model(input_ids=ids[None]).logits[0]
                share = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX) / targets
                share.backward()
                total += share.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _train(rank: int, folder: str, cases: list[dict[str, Any]], steps: int) -> list[str]:
    size, wrong = dist.get_world_size(), []
    for case in cases:
        config = TrainConfig(
            model_name_or_path=MODEL, random_init=True, data_path=f"{folder}/data.pkl", packing="best_fit",
            output_dir=f"{folder}/{next(_runs)}", model_max_length=LENGTH, max_steps=steps, learning_rate=1e-3,
            lr_scheduler_type="constant", **case,
        )  # fmt: skip
        world = World(rank, size, rank, size, CPU)
        inputs = prepare(config, llama3.FAMILY, world)
        trainer = Trainer(config, inputs, world, build_engine(config, inputs, world))
        losses = []
        for step in range(steps):
            loss = trainer.step(step).loss.clone()
            dist.all_reduce(loss)
            losses.append(loss.item())
        want = _reference(folder, trainer.inputs.stream.sequences_per_step, steps)
        error = max(abs(a - b) / b for a, b in zip(losses, want, strict=True))
        if not error < 1e-5:
            wrong.append(f"{case}: {losses} against {want}")
    return wrong


def _notes(folder: Path, ranks: int = 1, sequence: tuple[int, ...] = (1, 2, 3), **flags: Any) -> tuple[str, ...]:
    """Returns the notes of a run on a long sequence and a short one."""
    (folder / "data.pkl").write_bytes(pickle.dumps({"input_ids": [sequence, [1, 2, 3]]}))
    flags = {"packing": "best_fit", "max_steps": 1} | flags
    config = TrainConfig(
        model_name_or_path=MODEL, random_init=True, data_path=f"{folder}/data.pkl", output_dir=f"{folder}/run", **flags
    )
    return prepare(config, llama3.FAMILY, World(0, ranks, 0, ranks, CPU)).notes


def test_packing_is_refused_where_positions_depend_on_the_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not work with RoPE dynamic, which depends on a document's length"):
        _notes(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})


@pytest.mark.parametrize("tokens, warned", [(8192, False), (8193, True)])
def test_positions_of_packed_rows_count_from_each_document(tokens: int, warned: bool, tmp_path: Path) -> None:
    notes = _notes(tmp_path, sequence=(1,) * tokens, model_max_length=16384)
    assert any(f"sequences of {tokens} tokens exceed the 8192 positions" in note for note in notes) == warned


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_that_packed_documents_make_uneven_is_warned_of(schedule: str, tmp_path: Path) -> None:
    def warned(schedule: str, ranks: int, packing: str = "best_fit") -> bool:
        notes = _notes(tmp_path, ranks, schedule=schedule, packing=packing)
        return any(
            note.startswith(f"warning: --schedule {schedule} does not balance packed documents") for note in notes
        )

    table = packed_schedule(make_schedule(schedule, 8), Nodes((0, 100, 700, 720, 724, 1024)))
    assert warned(schedule, 8) == (balance(table) < 0.9), balance(table)
    assert not warned(schedule, 1) and not warned(schedule, 8, "none") and not warned("auto", 8)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_packed_training_under_more_schedules_equals_training_on_each_alone(world: int, tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{}, {"schedule": "zigzag", "gradient_accumulation_steps": 2, "remat": "full"}]
    if world > 1:
        cases += [{"schedule": "striped", "offload": "activations"}, {"schedule": "ulysses", "remat": "none"}]
    if world == 4:
        cases = [{"schedule": "usp"}, {"schedule": "balanced", "sequence_parallel_size": 2}, *cases[:1]]
    _compare(tmp_path, world, cases)


def _compare(folder: Path, world: int, cases: list[dict[str, Any]]) -> None:
    (folder / "data.pkl").write_bytes(pickle.dumps({"input_ids": [x.tolist() for x in _documents()]}))
    wrong = spawn(world, _train, str(folder), cases, 2)[0]
    assert not wrong, "\n".join(wrong)
