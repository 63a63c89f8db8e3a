"""The shipped model: its folder, loading and accuracy."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3ForCausalLM

from turnwise_calculator_demo import model_dir
from turnwise_calculator_demo.evaluate import Episode, Player, evaluate, main, summarize
from turnwise_calculator_demo.tasks import generate_problems
from turnwise_calculator_demo.train import main as train_main

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_the_folder_is_complete_and_small() -> None:
    """The folder has six files, no pickle, and at most 3 MB."""
    assert {path.name for path in model_dir().iterdir()} == FILES
    assert sum(path.stat().st_size for path in model_dir().iterdir()) <= 3_000_000


def test_it_loads_as_any_checkpoint() -> None:
    """The auto classes load a float32 Qwen3 with tied embeddings and a matching tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(model_dir())
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    assert isinstance(model, Qwen3ForCausalLM)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.max_position_embeddings >= 1024


def test_sampling_defaults_are_plain() -> None:
    """The generation config samples at temperature 1 from the full distribution."""
    config = GenerationConfig.from_pretrained(model_dir())
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (True, 1.0, 1.0, 0)


def test_older_releases_find_the_tokenizer() -> None:
    """transformers 4 knows the name of the tokenizer's class."""
    config = json.loads((model_dir() / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert isinstance(config.get("extra_special_tokens", {}), dict)


def test_a_few_greedy_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    """The command runs episodes that call the tool and prints the metrics."""
    main(["--num", "16", "--temperature", "0", "--threads", "1"])
    printed = capsys.readouterr().out
    assert "episodes            16" in printed
    assert "tool use            1.000" in printed


def test_an_episode_is_appended_to_and_never_re_encoded() -> None:
    """The ids of an episode start with its prompt and decode to its turns in order."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    player = Player(AutoModelForCausalLM.from_pretrained(model_dir()), tokenizer, temperature=1.0)
    torch.manual_seed(0)
    [episode] = player.play([next(generate_problems("test", 0))])
    text = tokenizer.decode(episode.ids)
    assert text.startswith("<|im_start|>system\nTools: calculator(expression)<|im_end|>\n<|im_start|>user\n")
    for turn in episode.turns:
        _, separator, text = text.partition(turn)
        assert separator == turn


def test_metrics_of_known_episodes() -> None:
    """Accuracy, tool use and lengths are means over the episodes."""
    problem = next(generate_problems("test", 0))
    right = Episode(problem, [1] * 10, num_calls=3, turns=[f"The answer is {problem.answer}."])
    wrong = Episode(problem, [1] * 20, num_calls=0, turns=["I do not know."])
    report = summarize([right, wrong])
    assert (report.accuracy, report.tool_use, report.calls_per_episode) == (0.5, 0.5, 1.5)
    assert (report.tokens_per_episode, report.longest) == (15.0, 20)
    assert report.accuracy_by_steps == {len(problem.steps): 0.5}


@pytest.mark.slow
def test_training_writes_a_folder_that_evaluates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two training steps write a folder with the same files as the shipped one."""
    train_main(["--out", str(tmp_path / "model"), "--steps", "2", "--threads", "1"])
    assert {path.name for path in (tmp_path / "model").iterdir()} == FILES
    assert "step     2/2" in capsys.readouterr().out
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode & 0o444 == 0o444
    assert evaluate(tmp_path / "model", num=2).num_episodes == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_accuracy_at_the_start_of_training(seed: int) -> None:
    """At temperature 1 the model nearly always calls the tool and solves about half of the held-out tasks."""
    report = evaluate(num=128, temperature=1.0, seed=seed)
    assert 0.30 < report.accuracy < 0.60
    assert report.tool_use >= 0.95
    assert report.tokens_per_episode < 150


@pytest.mark.slow
def test_there_is_room_above() -> None:
    """Greedy decoding solves nearly all tasks, so training has room to improve sampling."""
    assert evaluate(num=128, temperature=0.0).accuracy > 0.9
