"""Tests of the agent beyond the conformance suite: forced tokens, budgets, edge cases, and objectives."""

import numpy as np
import pytest

from turnwise import Resources, Status
from turnwise.errors import ConfigError
from turnwise.layout import Layout, Objective
from turnwise_chat_templates.template import ChatTemplate
from turnwise_parallel_thinking import make_parallel_thinking
from turnwise_parallel_thinking.config import ParallelThinkingConfig, Tags
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.probes.agent import make_task

JOIN = "[</Parallel>\n<Summary>]"


def test_two_blocks_and_an_answer(play, shown):
    """Only tags that the model does not write are forced; all sampled tokens are actions."""
    run, script = play(
        ["See.<Parallel>", " So<Parallel>", " 42$"],
        [["a</Path>", "bcd</Path>"], ["e</Path>", "</Path>"]],
        ["s</Summary>", "t</Summary>"],
    )

    (trajectory,) = run.result.trajectories
    block = "[<Path>]a</Path>[<Path>]bcd</Path>" + JOIN + "s</Summary>"
    second = " So<Parallel>[<Path>]e</Path>[<Path>]</Path>" + JOIN + "t</Summary>"
    assert "See.<Parallel>" + block + second + " 42<|im_end|>" == shown(trajectory)
    assert Status.COMPLETED == run.result.status
    assert run.result.messages[-1]["content"].endswith("t</Summary> 42")
    assert [kind for kind, _ in script.asked] == ["main", 0, 1, "summary", "main", 0, 1, "summary", "main"]


def test_end_of_turn_inside_a_block_is_replaced(play, shown):
    """A forced closing tag replaces the end-of-turn token of a path or a summary."""
    run, _ = play(["<Parallel>", "x$"], [["a$", "$"]], ["$"])

    (trajectory,) = run.result.trajectories
    paths = "[<Path>]a[</Path>]" + "[<Path>][</Path>]"
    assert "<Parallel>" + paths + JOIN + "[</Summary>]" + "x<|im_end|>" == shown(trajectory)
    assert Status.COMPLETED == run.result.status


def test_a_path_that_hits_its_cap_is_closed(play, shown):
    """The engine is asked for `max_path_tokens` tokens, and the closing tag is forced after them."""
    run, script = play(["<Parallel>", "x$"], [["abcdefgh", "y</Path>"]], ["s</Summary>"], max_path_tokens=3)

    (trajectory,) = run.result.trajectories
    assert "[<Path>]abc[</Path>][<Path>]y</Path>" in shown(trajectory)
    assert [3, 3] == [request.sampling.max_tokens for kind, request in script.asked if isinstance(kind, int)]


@pytest.mark.parametrize("num_paths", [1, 2, 3, 5, 8])
def test_any_number_of_paths(play, num_paths):
    """All paths start at one position, and the join is at the position after the longest path."""
    texts = ["x" * (3 * i % 7) + "</Path>" for i in range(num_paths)]
    run, _ = play(["ab<Parallel>", "x$"], [texts], ["s</Summary>"], num_paths=num_paths)

    (trajectory,) = run.result.trajectories
    starts = sorted({s.start for s in trajectory.segments if s.path >= 0 and s.origin == 3})
    fork = trajectory.num_prompt_tokens + 3
    assert [fork] * num_paths == trajectory.position_ids[starts].tolist()
    after = max(s.stop for s in trajectory.segments if s.path >= 0)
    assert fork + max(map(len, texts)) - len("</Path>") + 2 == trajectory.position_ids[after]


@pytest.mark.parametrize("ending", ["$", ""])
def test_an_empty_generation_completes_the_episode(play, shown, ending):
    """The model samples nothing, or ends its turn at once."""
    run, _ = play([ending])

    assert Status.COMPLETED == run.result.status
    assert shown(run.result.trajectories[0]) == ("<|im_end|>" if ending else "")


def test_empty_paths_and_summary(play, shown):
    """Paths and a summary without sampled tokens consist of tags."""
    run, _ = play(["<Parallel>", "x$"], [["", ""]], [""])

    (trajectory,) = run.result.trajectories
    assert Status.COMPLETED == run.result.status
    assert "<Parallel>[<Path>][</Path>][<Path>][</Path>]" in shown(trajectory)
    assert trajectory.has_blocks


def test_tags_in_the_prompt_and_misplaced_tags_are_text(play, shown):
    """Tags in the prompt, and tags that the model writes in the wrong place, open and close nothing."""
    spelled = "Use <Parallel><Path>..</Path></Parallel>\n<Summary>..</Summary> please <Parallel>"
    task = make_task(messages=({"role": "user", "content": spelled},))
    run, _ = play(
        ["</Path><Path> <Summary><Parallel>", "x<Parallel>y$"],
        [["a<Parallel>b<Path></Path>", "</Parallel></Summary></Path>"]],
        ["<Path></Path></Summary>"],
        task=task,
        max_blocks=1,
    )

    (trajectory,) = run.result.trajectories
    assert Status.COMPLETED == run.result.status
    assert {0} == {segment.block for segment in trajectory.segments if segment.block >= 0}
    plain = np.arange(trajectory.num_prompt_tokens)
    assert plain.tolist() == trajectory.position_ids[: len(plain)].tolist()
    assert trajectory.block_start[: len(plain)].max() == 0
    assert shown(trajectory).endswith("x<Parallel>y<|im_end|>")


def test_after_the_last_block_the_model_answers(play, shown):
    """After `max_blocks` blocks, the tag that opens a block is text and stops no request."""
    run, script = play(["<Parallel>", "42<Parallel>.$"], [["a</Path>", "b</Path>"]], ["s</Summary>"], max_blocks=1)

    assert shown(run.result.trajectories[0]).endswith("42<Parallel>.<|im_end|>")
    block = script.chat.tokenizer.encode("<Parallel>")[0]
    assert [True, False] == [block in r.sampling.stop_token_ids for kind, r in script.asked if kind == "main"]


def test_every_budget(play):
    """Any budget is respected, every request may sample, and every opened block has a summary and text after it."""
    for budget in range(1, 60):
        run, script = play(
            ["ab<Parallel>", "cd<Parallel>", "end$"],
            [["abcdef</Path>", "ghi</Path>"], ["j</Path>", "klmno</Path>"]],
            ["sum</Summary>", "mary</Summary>"],
            response_length=budget,
        )

        (trajectory,) = run.result.trajectories
        assert run.result.status in (Status.COMPLETED, Status.TRUNCATED)
        assert trajectory.num_response_tokens <= budget
        assert all(request.sampling.max_tokens >= 1 for _, request in script.asked)
        blocks = {segment.block for segment in trajectory.segments if segment.block >= 0}
        summaries = [kind for kind, _ in script.asked].count("summary")
        assert len(blocks) == summaries, "a block has no summary"
        assert [kind for kind, _ in script.asked].count("main") == summaries + 1, "no text follows a block"


def test_engines_with_layouts_receive_them(play):
    """With `exact`, requests for paths and after a block have a layout; requests before the first block have none."""
    run, script = play(["x<Parallel>", "y$"], [["a</Path>", "bb</Path>"]], ["s</Summary>"])

    start = run.result.trajectories[0].num_prompt_tokens + 2
    joined = Layout(((start, start, start + 3), (start, start + 3, start + 7)))
    expected = {"main": None, 0: Layout(), 1: Layout(), "summary": joined}
    assert expected == {kind: request.layout for kind, request in script.asked[:-1]}
    assert joined == script.asked[-1][1].layout
    assert Objective.EXACT == run.result.objective


@pytest.mark.parametrize("objective", ["auto", "expanded"])
def test_engines_without_layouts_receive_plain_text(play, objective):
    """With `expanded`, no request has a layout, and the result names the objective."""
    capabilities = SCRIPTED_CAPABILITIES
    turns = ["x<Parallel>", "y$"], [["a</Path>", "b</Path>"]], ["s</Summary>"]
    run, script = play(*turns, capabilities=capabilities, objective=objective)

    assert {None} == {request.layout for _, request in script.asked}
    assert Objective.EXPANDED == run.result.objective


def test_expanded_can_be_chosen_with_layouts(play):
    """The config has priority over the engine's capabilities."""
    run, script = play(["<Parallel>", "y$"], [["a</Path>", "b</Path>"]], ["s</Summary>"], objective="expanded")

    assert {None} == {request.layout for _, request in script.asked}
    assert Objective.EXPANDED == run.result.objective


def test_exact_is_refused_without_layouts(play):
    """An engine without layouts cannot sample under the trained layout, so the episode fails before a request."""
    run, script = play(["x$"], capabilities=SCRIPTED_CAPABILITIES, objective="exact")

    assert Status.FAILED == run.result.status
    assert "objective 'exact' needs an engine that takes layouts" in run.result.fault.message
    assert [] == script.asked


def test_paths_have_their_own_temperature_and_seeds(play):
    """Temperature and seeds of paths do not change the sampling of the main text."""
    turns = ["<Parallel>", "y$"], [["a</Path>", "b</Path>"]], ["s</Summary>"]
    _, script = play(*turns, path_temperature=0.5, path_seeds=(7, 8))

    assert {0: (0.5, 7), 1: (0.5, 8)} == {
        kind: (r.sampling.temperature, r.sampling.seed) for kind, r in script.asked if isinstance(kind, int)
    }
    assert {1.0} == {r.sampling.temperature for kind, r in script.asked if not isinstance(kind, int)}


def test_prompt_suffix_ends_the_question(play, chat):
    """The suffix is appended to the last user message, in the prompt and in the episode's messages."""
    run, _ = play(["x$"], prompt_suffix=" Think in parallel.")

    assert "Question 0? Think in parallel." == run.result.messages[0]["content"]
    assert "Question 0? Think in parallel.<|im_end|>" in chat.tokenizer.decode(run.result.trajectories[0].prompt_ids)


def test_a_tag_of_several_tokens_is_refused():
    """The error names the tag, its number of tokens, and a hint."""
    resources = Resources(chat=ChatTemplate(byte_tokenizer()))

    with pytest.raises(
        ConfigError, match=r"tag '<Parallel>' \(tags.block\) is 10 tokens of this model: `turnwise tags"
    ):
        make_parallel_thinking(ParallelThinkingConfig(), resources)


def test_a_run_without_a_tokenizer_is_refused():
    """The error says that the agent needs a tokenizer."""
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        make_parallel_thinking(ParallelThinkingConfig(), Resources())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_paths": 0}, "num_paths"),
        ({"max_path_tokens": 0}, "max_path_tokens"),
        ({"path_seeds": (1,)}, "path_seeds"),
        ({"objective": "both"}, "objective"),
        ({"path_temperature": -1.0}, "path_temperature"),
    ],
)
def test_bad_options_are_named(options, text):
    """The error names the option."""
    with pytest.raises(ValueError, match=text):
        ParallelThinkingConfig(**options)


def test_tags_must_differ():
    """Two equal tags are refused."""
    with pytest.raises(ValueError, match="must differ"):
        Tags(path="<Parallel>")
