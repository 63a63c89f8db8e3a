"""Tests of demonstrations: from tagged text to records, and well-formed text."""

import numpy as np
import pytest

from turnwise.errors import DataError
from turnwise.record.invariants import check_trajectory
from turnwise_parallel_thinking.config import Tags
from turnwise_parallel_thinking.demonstrations import build_trajectory
from turnwise_parallel_thinking.tagged_text import extract_paths, is_well_formed, parse_tagged_text

TEXT = "See.<Parallel>\n<Path>a</Path>\n<Path>bc</Path>\n</Parallel>\n<Summary>s</Summary> So 4."
SAMPLED = ["See.<Parallel>", " So 4.$"], [["a</Path>", "bc</Path>"]], ["s</Summary>"]


def test_a_demonstration_is_the_record_of_an_episode(play, chat):
    """The converter makes the same record from a text as the agent does from a model that writes it."""
    run, _ = play(*SAMPLED)
    (played,) = run.result.trajectories
    made = build_trajectory(played.prompt_ids, TEXT, chat.tokenizer, end=chat.stop_token_ids)

    check_trajectory(made)
    for name in ("input_ids", "response_mask", "position_ids", "block_start", "path_start"):
        assert getattr(played, name).tolist() == getattr(made, name).tolist()
    assert played.layout == made.layout


def test_tags_in_the_prompt_are_left_alone(chat):
    """Only the response is parsed, so the record has no block."""
    prompt = chat.tokenizer.encode("Write <Parallel><Path>..</Path> if you like")
    record = build_trajectory(prompt, "no block", chat.tokenizer)

    assert not record.has_blocks
    assert np.arange(len(record)).tolist() == record.position_ids.tolist()


def test_empty_pieces(chat):
    """Empty texts, paths and summaries give a record that consists of tags."""
    text = "<Parallel><Path></Path><Path></Path></Parallel><Summary></Summary>"
    record = build_trajectory([1], text, chat.tokenizer)

    assert [1, 1, 1, 1] == record.response_mask[record.response_mask == 1].tolist(), "<Parallel>, two </Path>, a closer"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<Parallel><Path>a</Path>", "</Parallel> expected, found the end of the text"),
        ("<Parallel><Path>a</Parallel>", "</Path> expected"),
        ("<Parallel></Parallel><Summary></Summary>", "has no <Path>"),
        ("<Parallel><Path>a</Path></Parallel>", "<Summary> expected"),
        (
            "<Parallel><Path>a</Path>text<Path>b</Path></Parallel><Summary></Summary>",
            "only white space expected between the tags of a block, found 'text'",
        ),
        ("a</Path>b", "'</Path>' is misplaced"),
        ("<Parallel><Path>a<Parallel></Path></Parallel><Summary></Summary>", "</Path> expected, found '<Parallel>'"),
    ],
)
def test_malformed_texts_are_refused(text, message):
    """The error names the expected piece and the one that was found."""
    with pytest.raises(DataError, match=message):
        parse_tagged_text(text, Tags())


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
    """Well-formed text has at least two paths per block, a summary, and every tag closed and in order."""
    assert expected is is_well_formed(text, Tags())


def test_paths_of_a_text():
    """The paths of each block are found, also in a text that is malformed after it."""
    assert [["a", "bc"]] == extract_paths(TEXT + "</Path>", Tags())
