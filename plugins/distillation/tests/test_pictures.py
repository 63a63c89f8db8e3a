"""Teachers of tasks with pictures: they see what the policy is trained on, or refuse the tasks."""

import numpy as np
import pytest

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise.errors import ConfigError
from turnwise.media import picture_part
from turnwise.protocols import ModelSpec
from turnwise.types import MediaTokens, PlacedPicture
from turnwise_calculator_demo import model_dir
from turnwise_distillation.config import TeacherConfig
from turnwise_distillation.teacher import Teacher
from turnwise_grpo_trainer.config import PolicyConfig
from turnwise_grpo_trainer.objective.scorers import ScoringRun
from turnwise_testing.inputs.vision import draw_picture
from turnwise_testing.references.vision_reference import VisionReference
from turnwise_tiny_models import save_random_vision

FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def start_teacher(path, tasks=(), **options):
    """Return a scorer with one model, checked and loaded."""
    run = ScoringRun(model=ModelSpec(path=path), policy=PolicyConfig(device="cpu"), temperature=1.0, tasks=tasks)
    teacher = Teacher(TeacherConfig(device="cpu", **(options or {"path": path})))
    teacher.check(run)
    teacher.start(run)
    return teacher


def make_episode(uid, prompt, pictures=()):
    """Return an episode with one turn; the pictures are among the tokens of its prompt."""
    record = Trajectory(MediaTokens(token_ids=prompt, pictures=pictures))
    record.add_action([30, 31, 32, 33], [-1.0] * 4)
    task = Task(messages=({"role": "user", "content": "?"},), uid=uid)
    scores = (TrajectoryScore(value=1.0),)
    return EpisodeResult(task=task, status=Status.COMPLETED, trajectories=(record,), scores=scores)


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request, tmp_path_factory):
    """A random vision-language model and its forward pass."""
    return VisionReference(save_random_vision(request.param, tmp_path_factory.mktemp(request.param)))


def test_a_teacher_sees_the_pictures(reference):
    """Its values are those of a forward pass with the picture, in rows with two, one and no picture."""
    first, second = (draw_picture(number, 24 + 8 * number, 24) for number in (0, 1))
    one, two = reference.write(first), reference.write(second)
    placed = PlacedPicture(start=3, num_tokens=len(one), picture=first)
    other = PlacedPicture(start=3, num_tokens=len(two), picture=second)
    after = PlacedPicture(start=5 + len(one), num_tokens=len(two), picture=second)
    episodes = [
        make_episode("one", [20, 21, 22, *one, 23, 24], [placed]),
        make_episode("none", [20, 21]),
        make_episode("two", [20, 21, 22, *one, 23, 24, *two, 25], [placed, after]),
        make_episode("other", [20, 21, 22, *two, 23, 24], [other]),
    ]

    scored = start_teacher(reference.path).score(episodes)

    for each in scored:
        (record,) = each.trajectories
        ids, num_prompt = record.input_ids.tolist(), record.num_prompt_tokens
        expected, *_ = reference.scores(ids, num_prompt, temperature=1.0, variant=0, pictures=record.pictures)
        found = record.column("teacher_logprobs")
        assert np.abs(found - np.asarray(expected)[-4:]).max() < 1e-4, each.uid


def test_a_teacher_of_text_refuses_pictures(reference):
    """Before the run if the tasks have them, and else when the first record with one is scored."""
    content = [picture_part(draw_picture(0)), {"type": "text", "text": "?"}]
    task = Task(messages=({"role": "user", "content": content},), uid="shown")
    with pytest.raises(ConfigError, match=r"teacher\.path: task 'shown' has a picture, and this model takes none"):
        start_teacher(model_dir(), [task])

    own = reference.write(draw_picture(0, 24, 24))
    placed = PlacedPicture(start=1, num_tokens=len(own), picture=draw_picture(0, 24, 24))
    teacher = start_teacher(model_dir())
    with pytest.raises(ConfigError, match=r"teacher\.path: the tasks have pictures, and this model takes none"):
        teacher.score([make_episode("a", [20, *own, 21], [placed])])


@pytest.mark.parametrize("value", [["a"], {"a": 1}, None, 1.5, True, 2, "c"])
def test_a_column_that_names_no_teacher_is_one_line(value):
    """Values of any type, such as the lists and objects of other frameworks' columns."""
    task = Task(messages=({"role": "user", "content": "?"},), uid="t", extra={"level": value})
    with pytest.raises(ConfigError, match=r"task 't' has .* in its column 'level'; there are teachers for '0', 'True'"):
        start_teacher(model_dir(), [task], teachers={"0": model_dir(), "True": model_dir()}, column="level")


def test_a_number_names_a_teacher():
    """Keys of a config are texts, which must not keep a column of numbers from choosing one."""
    task = Task(messages=({"role": "user", "content": "?"},), uid="t", extra={"level": 0})
    start_teacher(model_dir(), [task], teachers={"0": model_dir(), "1": model_dir()}, column="level")
