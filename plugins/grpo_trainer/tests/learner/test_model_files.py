"""The small files of an initial model in the folder of a trained one."""

from pathlib import Path

from turnwise_grpo_trainer.learner.model_files import copy_tokenizer


def test_files_of_the_tokenizer_are_copied(tmp_path: Path) -> None:
    """The records of `turnwise sft` beside a fine-tuned model are none of them, and no file is replaced."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "config.json", "sft.json", "log.json", "model.safetensors"):
        (source / name).write_text("old", encoding="utf-8")
    (folder / "tokenizer.json").write_text("new", encoding="utf-8")

    copy_tokenizer(source, folder)

    assert sorted(file.name for file in folder.iterdir()) == ["chat_template.jinja", "tokenizer.json"]
    assert (folder / "tokenizer.json").read_text(encoding="utf-8") == "new"
