"""Chat templates out of a model directory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.errors import ConfigError, TemplateError
from turnwise.protocols import ModelSpec
from turnwise_chat_templates import ChatTemplate, load_chat
from turnwise_testing.inputs.tokenizers import CHATML, byte_tokenizer

TOKENIZER = byte_tokenizer()
IM_END = 258
USER = {"role": "user", "content": "What is 6 * 7?"}
TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}


class TestLoading:
    """A model directory."""

    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        TOKENIZER.save_pretrained(tmp_path)
        return tmp_path

    def test_saves_and_loads(self, folder):
        """A saved tokenizer is a model directory's."""
        chat = load_chat(ModelSpec(path=folder))
        assert ChatTemplate(TOKENIZER).prompt([USER], [TOOL]).tolist() == chat.prompt([USER], [TOOL]).tolist()

    def test_stop_token_ids(self, folder):
        """The template's end-of-turn token first, then those of the generation config: none, one or several."""
        found = []
        for config in ({}, {"eos_token_id": 256}, {"eos_token_id": [258, 256, 261]}):
            (folder / "generation_config.json").write_text(json.dumps(config))
            found.append(load_chat(ModelSpec(path=folder)).stop_token_ids)
        assert found == [(258,), (258, 256), (258, 256, 261)]

    def test_a_template_is_split_into_words_once(self, folder, monkeypatch):
        """Each chat of a process asks which words its template has, and a text always has the same ones."""
        load_chat(ModelSpec(path=folder))
        monkeypatch.setattr("jinja2.lexer.Lexer.tokenize", None)
        load_chat(ModelSpec(path=folder))

    @pytest.mark.parametrize("config", ["[]", "{", '{"eos_token_id": "x"}'])
    def test_broken_generation_config(self, folder, config):
        """A generation config that cannot be read is named."""
        (folder / "generation_config.json").write_text(config)
        with pytest.raises(ConfigError, match=r"cannot read 'eos_token_id' in .*generation_config\.json"):
            load_chat(ModelSpec(path=folder))

    def test_other_template(self, folder, tmp_path):
        """A file replaces the model's template, and error texts name it."""
        file = tmp_path / "own.jinja"
        file.write_text("{{ mood }}" + CHATML)
        spec = ModelSpec(path=folder, chat_template=file, template_options={"mood": "calm"})
        chat = load_chat(spec)
        assert chat.tokenizer.decode(chat.prompt([USER])).startswith("calm<|im_start|>user")
        file.write_text("{% endfor %}")
        with pytest.raises(TemplateError, match=r"the chat template '.*own\.jinja' does not parse: line 1"):
            load_chat(spec)

    def test_trusted_code_needs_a_commit(self, folder):
        """Code of a model runs only at a pinned commit."""
        with pytest.raises(ConfigError, match=r"needs its commit in model\.revision"):
            load_chat(ModelSpec(path=folder, trust_remote_code=True))
        spec = ModelSpec(path=folder, trust_remote_code=True, revision="0123abc")
        assert load_chat(spec).stop_token_ids == (IM_END,)

    def test_no_template(self, tmp_path):
        """The directory and the option are named."""
        byte_tokenizer(None).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=r"has no chat template; name a file of one in model\.chat_template"):
            load_chat(ModelSpec(path=tmp_path))

    def test_what_is_missing(self, folder, tmp_path):
        """Each missing piece is named by its option."""
        empty = tmp_path / "empty"
        empty.mkdir()
        large = tmp_path / "large.jinja"
        large.write_bytes(b" " * (1 << 21))
        cases = {
            r"model\.path: a chat template needs the directory": ModelSpec(),
            r"model\.path: .* no directory '.*nowhere'": ModelSpec(path=tmp_path / "nowhere"),
            r"model\.path: '.*empty' has no tokenizer files": ModelSpec(path=empty),
            r"model\.chat_template: cannot read '.*nowhere'": ModelSpec(
                path=folder, chat_template=tmp_path / "nowhere"
            ),
            r"model\.chat_template: '.*large\.jinja' is larger": ModelSpec(path=folder, chat_template=large),
        }
        for text, spec in cases.items():
            with pytest.raises(ConfigError, match=text) as caught:
                load_chat(spec)
            assert "\n" not in str(caught.value)

    def test_without_transformers(self, folder, monkeypatch):
        """The extra that brings tokenizers is named."""
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ConfigError, match="pip install 'turnwise\\[tokenizers\\]'"):
            load_chat(ModelSpec(path=folder))


MODEL_TYPES = (None, "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizerFast")


@pytest.mark.many_cases
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("name", CLASSES)
def test_the_tokenizer_is_the_one_of_auto_tokenizer(tmp_path, name, model_type):
    """Its class is known for the commonest models, so that workers need not import what `AutoTokenizer` imports."""
    transformers = pytest.importorskip("transformers")
    byte_tokenizer().save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": name}))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True, trust_remote_code=False)

    loaded = load_chat(ModelSpec(path=tmp_path)).tokenizer._tokenizer

    assert type(expected) is type(loaded)
    assert expected.special_tokens_map == loaded.special_tokens_map
    assert expected.backend_tokenizer.to_str() == loaded.backend_tokenizer.to_str()


def test_loading_imports_no_tensor_library(tmp_path):
    """A worker that calls a remote engine needs no torch, which takes seconds and hundreds of megabytes."""
    byte_tokenizer().save_pretrained(tmp_path)
    code = (
        "import sys; from pathlib import Path\n"
        "from turnwise_chat_templates import load_chat; from turnwise.protocols import ModelSpec\n"
        "load_chat(ModelSpec(path=Path(sys.argv[1]))); sys.exit('torch' in sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
