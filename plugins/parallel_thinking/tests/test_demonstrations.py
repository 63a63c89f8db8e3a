"""From tagged text to records, and what is well formed."""

import numpy as np
import pytest

from turnwise.errors import DataError
from turnwise.invariants import check_trajectory
from turnwise_parallel_thinking.config import Tags
from turnwise_parallel_thinking.demonstrations import trajectory_of
from turnwise_parallel_thinking.tagged_text import is_well_formed, parse, paths_of

TEXT = "See.<Parallel>\n<Path>a</Path>\n<Path>bc</Path>\n</Parallel>\n<Summary>s</Summary> So 4."
SAMPLED = ["See.<Parallel>", " So 4.$"], [["a</Path>", "bc</Path>"]], ["s</Summary>"]


def test_a_demonstration_is_the_record_of_an_episode(play, chat):
    """What the agent records of a model that writes a text, and what the converter makes of the text, are one."""
    run, _ = play(*SAMPLED)
    (played,) = run.result.trajectories
    made = trajectory_of(played.prompt_ids, TEXT, chat.tokenizer, end=chat.stop_token_ids)

    check_trajectory(made)
    for name in ("input_ids", "response_mask", "position_ids", "block_start", "path_start"):
        assert getattr(played, name).tolist() == getattr(made, name).tolist()
    assert played.layout == made.layout


def test_tags_in_the_prompt_are_left_alone(chat):
    """Only the response is parsed."""
    prompt = chat.tokenizer.encode("Write <Parallel><Path>..</Path> if you like")
    record = trajectory_of(prompt, "no block", chat.tokenizer)

    assert not record.has_blocks
    assert np.arange(len(record)).tolist() == record.position_ids.tolist()


def test_empty_pieces(chat):
    """Empty texts, paths and summaries are records of nothing but tags."""
    text = "<Parallel><Path></Path><Path></Path></Parallel><Summary></Summary>"
    record = trajectory_of([1], text, chat.tokenizer)

    assert [1, 1, 1, 1] == record.response_mask[record.response_mask == 1].tolist(), "<Parallel>, two </Path>, a closer"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<Parallel><Path>a</Path>", "</Parallel> expected, found the end of the text"),
        ("<Parallel><Path>a</Parallel>", "</Path> expected"),
        ("<Parallel></Parallel><Summary></Summary>", "holds no <Path>"),
        ("<Parallel><Path>a</Path></Parallel>", "<Summary> expected"),
        ("<Parallel><Path>a</Path>text<Path>b</Path></Parallel><Summary></Summary>", "text between tags"),
        ("a</Path>b", "out of its place"),
        ("<Parallel><Path>a<Parallel></Path></Parallel><Summary></Summary>", "</Path> expected, found '<Parallel>'"),
    ],
)
def test_broken_texts_are_refused(text, message):
    """The text says what was expected and what was found."""
    with pytest.raises(DataError, match=message):
        parse(text, Tags())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TEXT, True),
        ("no block at all", True),
        ("<Parallel><Path>a</Path></Parallel><Summary></Summary>", False),
        ("<Parallel><Path>a</Path><Path>b</Path></Parallel>", False),
        (TEXT + "</Path>", False),
        (TEXT + "<Parallel>", False),
    ],
)
def test_well_formed(text, expected):
    """Two paths at least, a summary, everything closed, nothing astray."""
    assert expected is is_well_formed(text, Tags())


def test_paths_of_a_text():
    """The paths of each block, also of a text that goes wrong later."""
    assert [["a", "bc"]] == paths_of(TEXT + "</Path>", Tags())
