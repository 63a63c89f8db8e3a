"""The forms of `model.path`: ids, folders, files, and texts that are none of them."""

import os

import pytest

from turnwise.config.file import dump_yaml, load_config, with_absolute_paths
from turnwise.errors import ConfigError
from turnwise.models.finding import find_model
from turnwise.models.hub import select_files
from turnwise.models.location import ModelSource, is_model_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"
IDS = ("gpt2", "Qwen/Qwen3-0.6B", "a/b", "meta-llama/Llama-3.1-8B-Instruct", "x_1/y.z-w", "0x/1")
OTHERS = (
    *("./typo", "../typo", "/nowhere", "~/model", "a/b/c", "", ".", "..", "a/", "/a", "a//b", "a b", "-a/b", "a/.b"),
    *("a/b.", "a/b-", "a--b/c", "a..b", "a/b.git", "a/b.gguf", "é/b", "a/b\n", "a:b", "x" * 97, "a\\b"),
)


@pytest.mark.parametrize("text", IDS)
def test_ids(text):
    """The forms that the hub gives to its models."""
    assert is_model_id(text)


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_texts_that_are_no_ids(number):
    """The hub has no model of such a name, so it is not asked."""
    assert not is_model_id(OTHERS[number])


def test_ids_are_those_of_the_library():
    """The library of the hub refuses none of our ids, and would refuse most of the others."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    for text in IDS:
        validate_repo_id(text)
    for text in ("./typo", "a/b/c", "a--b/c", "a..b", "a/b.git", "-a/b", "x" * 97):
        with pytest.raises(HFValidationError):
            validate_repo_id(text)


def source(path, base_dir, **options):
    return ModelSource(path=path, base_dir=base_dir, **options)


@pytest.mark.parametrize("path", ["acme", "acme/tiny"])
def test_a_folder_comes_before_an_id(tmp_path, path):
    """A folder of the spelling of an id is the model, unless the run that continues had it from the hub."""
    (tmp_path / path).mkdir(parents=True)
    assert find_model(source(path, tmp_path)).folder == tmp_path / path
    assert source(path, tmp_path, commit=COMMIT).is_on_hub
    assert source(path, tmp_path / "elsewhere").is_on_hub


def test_a_file_comes_before_an_id(tmp_path):
    """A file of the spelling of an id is no model."""
    (tmp_path / "tiny").write_text("")
    with pytest.raises(ConfigError, match=r"^model\.path: '.*tiny' is a file; expected a folder, or a file that ends"):
        find_model(source("tiny", tmp_path))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("./typo", r"no directory '.*typo', and './typo' is no id of a model on the hub, such as"),
        ("a/b/c", r"no directory '.*a/b/c', and 'a/b/c' is no id"),
        ("models/none.gguf", r"there is no file '.*models/none\.gguf'"),
    ],
)
def test_what_is_neither_is_one_line(tmp_path, path, text):
    """The error names the key, the folder that was looked for, and the form of an id."""
    with pytest.raises(ConfigError, match=r"^judge\.model\.path: .*" + text) as caught:
        find_model(source(path, tmp_path, key="judge.model.path"))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.environ.get("HF_HUB_OFFLINE") != "1", reason="conftest.py keeps tests from the network")
def test_offline_without_the_model(tmp_path):
    """Without the network and without the model in the cache, the line says both, and the hint."""
    with pytest.raises(ConfigError, match=r"^model\.path: .*HF_HUB_OFFLINE is set, and .* lacks acme/none-such"):
        find_model(source("acme/none-such", tmp_path))


def test_the_config_of_a_run_keeps_the_id(tmp_path):
    """Paths of a written config are absolute, but an id stays one, with its revision and its commit."""
    (tmp_path / "here").mkdir()
    config = {"data": {"path": "a.jsonl"}, "agent": "a", "engine": "e"}
    for path, expected in (("acme/tiny", "acme/tiny"), ("here", str(tmp_path / "here"))):
        file = tmp_path / "run.yaml"
        model = {"path": path, "revision": "v1"} | ({"commit": COMMIT} if path == "acme/tiny" else {})
        file.write_text(str({**config, "model": model}))
        written = with_absolute_paths(load_config(file))
        assert (written.model.path, written.model.revision) == (expected, "v1")
        (tmp_path / "run.yaml").write_text(dump_yaml(written))
        assert load_config(file).model == written.model


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"path": "a/b", "commit": "main"}, "must be a whole commit hash"),
        ({"path": "a/b", "revision": "f" * 40, "commit": COMMIT}, "the commit that 'revision' names"),
        ({"path": "./here", "commit": COMMIT}, "must be null for a 'path' that is no id"),
    ],
)
def test_commits_that_fit_nothing(tmp_path, model, text):
    """A commit belongs to a model of the hub, and to its revision."""
    with pytest.raises(ConfigError, match=text):
        load_config({"data": {"path": "a.jsonl"}, "agent": "a", "engine": "e", "model": model})


SMALL = ("config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "tokenizer.model", "qwen.tiktoken")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json")
OTHER_FORMS = (
    *("tf_model.h5", "flax_model.msgpack", "model.Q4_0.gguf", "onnx/model.onnx", "onnx/config.json", "README.md"),
    *("original/consolidated.00.pth", "metal/model.bin", "training_args.bin", "optimizer.pt", ".gitattributes"),
)
REPOSITORIES = {
    "one file": (("model.safetensors",), ("model.safetensors",)),
    "shards": ((*SHARDS, INDEX), (*SHARDS, INDEX)),
    "one file and shards": (("model.safetensors", *SHARDS, INDEX), ("model.safetensors",)),
    "shards and their consolidated form": ((*SHARDS, INDEX, "consolidated.safetensors"), (*SHARDS, INDEX)),
    "safetensors and pickles": ((*SHARDS, INDEX, *PICKLES, "pytorch_model.bin"), (*SHARDS, INDEX)),
    "other precisions": (("model.safetensors", "model.fp16.safetensors"), ("model.safetensors",)),
    "another name": (("weights.safetensors",), ("weights.safetensors",)),
    "one pickle": (("pytorch_model.bin",), ("pytorch_model.bin",)),
    "pickles": (PICKLES, PICKLES),
    "none": ((), ()),
}


@pytest.mark.parametrize("name", REPOSITORIES)
def test_one_form_of_the_weights_is_downloaded(name):
    """Of the weights one form, and no files of other programs; without weights only the small files."""
    weights, expected = REPOSITORIES[name]
    files = dict.fromkeys((*SMALL, *OTHER_FORMS, *weights), 1)
    assert select_files(files, weights=True) == sorted((*SMALL, *expected))
    assert select_files(files, weights=False) == sorted(SMALL)


def test_python_files_only_with_trust():
    """Code is downloaded for a run that trusts it, from subfolders too."""
    files = dict.fromkeys(("config.json", "modeling.py", "layers/attention.py"), 1)
    assert select_files(files, weights=False) == ["config.json"]
    assert select_files(files, weights=False, code=True) == ["config.json", "layers/attention.py", "modeling.py"]
