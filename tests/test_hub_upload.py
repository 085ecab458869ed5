"""Model cards of checkpoints, and --push_to_hub against a stand-in for the hub."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from programs import alone
from small import words, write_inputs

from lightseq.checkpoint.checkpoints import remove_checkpoints
from lightseq.checkpoint.manifest import find_damage
from lightseq.training import hub_upload

SAVES = "--max_steps 2 --save_steps 1 --learning_rate 1e-3"


class Hub:
    """Stands in for the hub. `refuses`: the calls that fail."""

    refuses: tuple[str, ...] = ()
    created: list[dict[str, Any]]
    uploaded: list[dict[str, Any]]

    def create_repo(self, name: str, private: bool | None, exist_ok: bool) -> Any:
        if "create_repo" in self.refuses:
            raise OSError("401 Unauthorized")
        self.created.append({"name": name, "private": private, "exist_ok": exist_ok})
        return SimpleNamespace(repo_id=name if "/" in name else f"me/{name}")

    def upload_folder(self, **arguments: Any) -> None:
        if "upload_folder" in self.refuses:
            raise OSError("connection lost")
        self.uploaded.append(arguments)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr(hub_upload, "HfApi", Hub)
    monkeypatch.setattr(Hub, "refuses", ())
    Hub.created, Hub.uploaded = [], []
    return Hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


def test_every_checkpoint_has_a_card_that_states_the_run(folder: Path) -> None:
    end = alone(words(folder, "out", SAVES))
    assert end.status == 0, end.err
    for step in (1, 2):
        _, head, text = (folder / "out" / f"checkpoint-{step}" / "README.md").read_text().split("---\n", 2)
        about = yaml.safe_load(head)
        assert about["library_name"] == "transformers" and about["tags"] == ["lightseq"]
        assert f"| step | {step} of 2 |" in text and "| training loss | " in text and "| hardware | 1 x cpu" in text
        assert "--learning_rate 0.001" in text and "--max_steps 2" in text
        assert str(folder) not in text, "places of this machine are not for the hub"


def test_a_card_that_a_user_has_edited_is_no_damage_and_outlives_the_checkpoint(folder: Path) -> None:
    assert alone(words(folder, "out", SAVES)).status == 0
    first, second = (folder / "out" / f"checkpoint-{step}" for step in (1, 2))
    (first / "README.md").write_text("my own words")
    assert find_damage(first) is None
    remove_checkpoints(folder / "out")
    assert [path.name for path in first.iterdir()] == ["README.md"] and not second.exists()


def test_the_newest_checkpoint_is_uploaded_without_what_only_a_resume_needs(folder: Path, hub: type[Hub]) -> None:
    end = alone(words(folder, "out", f"{SAVES} --push_to_hub True --hub_private_repo True"))
    assert end.status == 0, end.err
    assert hub.created == [{"name": "out", "private": True, "exist_ok": True}]
    [uploaded] = hub.uploaded
    assert uploaded["folder_path"] == str(folder / "out" / "checkpoint-2") and uploaded["repo_id"] == "me/out"
    assert set(uploaded["ignore_patterns"]) == {"state/*", "trainer_state.json", "manifest.json"}
    assert f"uploaded    {folder}/out/checkpoint-2 to https://huggingface.co/me/out" in end.out


def test_a_hub_that_refuses_the_repository_ends_the_run_before_it_trains(folder: Path, hub: type[Hub]) -> None:
    hub.refuses = ("create_repo",)
    end = alone(words(folder, "out", f"{SAVES} --push_to_hub True --hub_model_id me/books"))
    said = "repository me/books cannot be created (OSError: 401 Unauthorized); run `hf auth login`, or leave it out"
    assert end.status == 2 and end.err.strip().endswith(f"error: --push_to_hub: {said}")
    assert not (folder / "out").exists()


def test_a_failed_upload_names_the_command_that_makes_it(folder: Path, hub: type[Hub]) -> None:
    hub.refuses = ("upload_folder",)
    end = alone(words(folder, "out", f"{SAVES} --push_to_hub True"))
    checkpoint = folder / "out" / "checkpoint-2"
    assert end.status == 1 and checkpoint.exists()
    assert end.err.strip().endswith(f"type hf upload me/out {checkpoint} --exclude 'state/*'")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--hub_model_id me/books", "--hub_model_id me/books names where to upload; add --push_to_hub True"),
        ("--hub_private_repo True", "--hub_private_repo True is for an upload; add --push_to_hub True"),
        ("--push_to_hub True --save_strategy no", "uploads a checkpoint, and --save_strategy no writes none"),
    ],
)
def test_flags_of_an_upload_without_one_are_refused(folder: Path, hub: type[Hub], flags: str, said: str) -> None:
    end = alone(words(folder, "out", f"--max_steps 2 {flags}"))
    assert end.status == 2 and said in end.err and not hub.created
