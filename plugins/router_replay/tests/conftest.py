"""A tiny mixture of experts, and records whose tokens have routes."""

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from turnwise import EpisodeResult, ModelSpec, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate
from turnwise_moe_routes.shapes import read_shape
from turnwise_testing.references.reference_model import mixture_config, randomize_matrices

VOCABULARY = 40


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """The directory of a model of three layers, the first of which has no experts."""
    torch.manual_seed(0)
    config = mixture_config(VOCABULARY, hidden_size=16, num_experts=6, moe_intermediate_size=12, mlp_only_layers=[0])
    model = randomize_matrices(Qwen3MoeForCausalLM(config), 0.3)
    folder = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def spec(model_dir):
    """The model as a `ModelSpec`."""
    return ModelSpec(path=model_dir)


@pytest.fixture(scope="session")
def shape(model_dir):
    """The sizes of its routes."""
    return read_shape(model_dir)


@pytest.fixture
def double(model_dir):
    """The model in float64, with experts that work in it."""
    model = Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    model.set_experts_implementation("eager")
    return model


@pytest.fixture(scope="session")
def draw_routes(shape):
    """A function that returns (n, layers, top_k) different experts, and none in the layer without experts."""

    def draw(rng, count):
        routes = rng.random((count, shape.num_layers, shape.num_experts)).argsort(-1)[..., : shape.top_k]
        routes[:, 0] = -1
        return routes.astype(np.int16)

    return draw


@pytest.fixture(scope="session")
def make_record(shape, draw_routes):
    """
    A function that returns a record with an answer to a prompt.

    Its prompt has the routes of the generator `prompt_rng`, and the last token of the answer has none.
    """

    def make(rng, prompt, prompt_rng, size=4, *, last_known=False):
        record = Trajectory(prompt)
        routes = np.concatenate([draw_routes(prompt_rng, len(prompt)), draw_routes(rng, size)])
        if not last_known:
            routes[-1] = -1
        record.add_action(
            rng.integers(0, VOCABULARY, size), -rng.random(size).astype(np.float32), columns=[(shape.column, routes)]
        )
        return record

    return make


@pytest.fixture(scope="session")
def make_batch():
    """A function that returns a batch of groups of records, every third of which has a reward."""

    def make(records, group_size=4):
        return collate(
            [
                EpisodeResult(
                    task=Task(messages=({"role": "user", "content": "?"},), uid=f"t{number // group_size}"),
                    rollout_n=number % group_size,
                    status=Status.COMPLETED,
                    trajectories=(record,),
                    scores=(TrajectoryScore(value=float(number % 3)),),
                )
                for number, record in enumerate(records)
            ],
            pad_token_id=0,
        )

    return make
