"""Parts of single views: budget, credits, differences, times, pages and themes."""

import pytest
from transformers import AutoTokenizer
from viewer_runs import ROOT, build_episode, build_record, mixed_run, several_records, write_run

from turnwise.record.trajectory import Trajectory
from turnwise.types import Status, TokenScore
from turnwise_calculator_demo import model_dir

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow
expect = sync_api.expect

CONFIG = """\
model: {path: "package:turnwise_calculator_demo"}
data: {path: %s}
engine: transformers
agent: tool_agent
reward: exact_match
rollout: {response_length: %d}
"""


@pytest.mark.parametrize(
    ("budget", "left"), [(9, "4 tokens of the budget of 9 are left"), (5, "of 5 tokens is used up")]
)
def test_the_budget_is_marked(tmp_path, look, budget, left):
    """The tokens name the budget of a run's config and the tokens that are left; the turns name it if it ended them."""
    (tmp_path / "config.yaml").write_text(CONFIG % (ROOT / "examples/calculator.jsonl", budget))
    run = write_run(tmp_path, [build_episode(0, status=Status.TRUNCATED)])

    page = look(run, place="0/episode?key=task-0000/0&view=tokens")
    expect(page.locator(".budget")).to_have_text(f" 5 of at most {budget} response tokens")
    expect(page.locator(".end")).to_contain_text("truncated here: 5 response tokens after a prompt of 3")
    expect(page.locator(".end")).to_contain_text(left)
    assert page.locator(".budget meter").evaluate("each => each.value / each.max") == pytest.approx(5 / budget)

    page.get_by_role("link", name="Turns").click()
    reason = "it used its budget of 5 response tokens" if budget == 5 else "it reached a limit of tokens or turns"
    expect(page.locator(".cut")).to_contain_text(reason)


def test_the_limit_of_a_turn_is_marked(tmp_path, look):
    """A turn that used all its tokens says so in its head and after its last token; validation has its own limit."""
    limits = "rollout: {response_length: 9, sampling: {max_tokens: 2}, validation_sampling: {max_tokens: 1}}"
    config = CONFIG % (ROOT / "examples/calculator.jsonl", 9)
    (tmp_path / "config.yaml").write_text(config.replace("rollout: {response_length: 9}", limits))
    run = write_run(tmp_path, [build_episode(0), build_episode(1, validation=True)])
    page = look(run, place="0/episode?key=task-0000/0")
    marks, heads = page.locator(".tokenview .limit"), page.locator(".message h2")

    expect(heads.nth(1)).to_have_text("assistant ✂ used all 2 tokens of a turn")
    expect(page.locator(".limit")).to_have_count(1)
    page.get_by_role("link", name="Tokens", exact=True).click()
    expect(marks).to_have_text("✂ used all 2 tokens of a turn")
    assert marks.evaluate("each => each.previousElementSibling.dataset.i") == "4"
    page.locator('[data-i="3"]').hover()
    expect(page.locator(".detail")).to_contain_text("1, used all 2 tokens of a turn")
    page.locator('[data-i="7"]').hover()
    expect(page.locator(".detail")).not_to_contain_text("used all")

    place = "0/episode?view=tokens&key=task-0001/0-held-out"
    page.goto(f"{page.url.partition('#')[0]}#/{place}")
    expect(page.locator("#heading")).to_contain_text("task-0001/0-held-out")
    expect(marks).to_have_text("✂ used all 1 tokens of a turn")
    assert marks.evaluate("each => each.previousElementSibling.previousElementSibling.dataset.i") == "7"  # and a credit


def test_credits_are_beside_their_tokens(tmp_path, look):
    """Rewards of turns are beside the last token of each turn, and rewards of tokens beside each token that has one."""
    tokens = TokenScore(values=(0.0, 0.5, 0.0, 0.0, -0.25))
    run = write_run(tmp_path, [several_records(0), build_episode(1, trajectories=(build_record(),), scores=(tokens,))])
    page = look(run, place="0/episode?key=task-0000/0&view=tokens")

    def credits():
        return page.locator(".credit").evaluate_all(
            "all => all.map((each) => [Number(each.previousElementSibling.dataset.i), each.textContent.trim()])"
        )

    expect(page.locator(".credit")).to_have_count(2)
    assert credits() == [[4, "★ 0.25"], [7, "★ 0.5"]]
    page.goto(page.url.replace("task-0000", "task-0001"))
    expect(page.locator("#heading")).to_contain_text("task-0001/0")
    expect(page.locator(".credit")).to_have_text(["★ 0.5", "★ -0.25"])
    assert [place for place, _text in credits()] == [4, 7]


def test_best_and_worst_show_their_difference(tmp_path, look):
    """The words that only one of two episodes has are marked, and the others are not."""
    run = [
        build_episode(0, 0, reward=1.0, text="first add two and three, then answer five"),
        build_episode(0, 1, reward=0.0, text="first add two and two, then answer four"),
    ]
    page = look(write_run(tmp_path, run), place="0/groups")

    page.get_by_text("best beside worst").click()

    expect(page.locator(".columns .path")).to_have_count(2)
    best, worst = page.locator(".columns .path").all()
    # The text is the result of the tool, and the answer.
    expect(best.locator("mark")).to_have_text(["three,", "five", "three,", "five"])
    expect(worst.locator("mark")).to_have_text(["two,", "four", "two,", "four"])
    expect(best.locator(".text")).to_contain_text("first add two and three, then answer five")
    assert "underline" in best.locator("mark").first.evaluate("each => getComputedStyle(each).textDecorationLine")


def test_kinds_of_work_differ_in_shape(tmp_path, look):
    """Without colours, the place and height of a slice tell its kind, and the legend has the same shapes."""
    page = look(mixed_run(tmp_path), place="0/time")
    expect(page.locator(".lane").first).to_be_visible()
    shapes = {
        kind: {
            tuple(each)
            for each in page.locator(f"rect.{kind}").evaluate_all(
                "all => all.map((each) => [each.getAttribute('y'), each.getAttribute('height')])"
            )
        }
        for kind in ("episode", "generate", "tool", "reward")
    }

    assert all(len(each) == 1 for each in shapes.values())
    assert len({*map(frozenset, shapes.values())}) == len(shapes)
    for kind in shapes:
        assert page.locator(f".legend rect.{kind}").count() == 1


def test_an_episode_without_a_trace_has_the_shares_of_its_time(tmp_path, look):
    """The times of an episode are there without a trace, as shares of its whole time."""
    page = look(mixed_run(tmp_path), place="0/episode?key=task-0006/0&view=time")

    expect(page.locator(".lane")).to_have_count(1)
    expect(page.locator(".lane svg")).to_have_attribute("aria-label", "7.00 s: model 0 µs, tools 0 µs, reward 0 µs")


def test_pages_of_a_long_list(tmp_path, look):
    """A long list has further pages by button and by key, and a filter leads to its first page."""
    page = look(write_run(tmp_path, [build_episode(task, reward=task % 2) for task in range(230)]))
    rows, place = page.locator("table.episodes tbody tr"), page.locator(".pages span")
    expect(place).to_have_text("1\N{EN DASH}100 of 230")

    page.keyboard.press("n")
    expect(place).to_have_text("101\N{EN DASH}200 of 230")
    expect(rows.first).to_contain_text("task-0100/0")
    page.get_by_role("button", name="next").click()
    expect(rows).to_have_count(30)
    expect(page.get_by_role("button", name="next")).to_be_disabled()
    page.keyboard.press("p")
    expect(place).to_have_text("101\N{EN DASH}200 of 230")
    page.get_by_label("Reward from").fill("1")
    page.keyboard.press("Enter")
    expect(place).to_have_text("1\N{EN DASH}100 of 115")


def test_a_laptop_shows_long_lines_of_tokens(tmp_path, look):
    """On 1280 pixels a line of thousands of tokens is broken, so that each token is visible without a move sideways."""
    record = Trajectory([1])
    record.add_action([*range(10_000, 13_000)], [-0.1] * 3000)
    page = look(
        write_run(tmp_path, [build_episode(trajectories=(record,))]), place="0/episode?key=task-0000/0&view=tokens"
    )
    expect(page.locator('[data-i="150"]')).to_be_visible()

    view = page.locator(".tokenview")
    assert view.evaluate("each => each.scrollWidth <= each.clientWidth")
    box = view.bounding_box()
    edges = page.locator("[data-i]").evaluate_all("all => all.map((each) => each.getBoundingClientRect().right)")
    assert max(edges) <= box["x"] + box["width"]
    # A hundred tokens take few lines, so a window has several hundreds of them.
    tops = page.locator("[data-i]").evaluate_all(
        "all => all.slice(0, 100).map((each) => each.getBoundingClientRect().top)"
    )
    assert len({*map(round, tops)}) <= 8


def test_the_theme_can_be_chosen(tmp_path, look):
    """The button changes light and dark, whatever the system has, and a reload keeps the choice."""
    page = look(mixed_run(tmp_path), scheme="light")
    root, background = page.locator("html"), "background-color"
    light = root.evaluate("each => getComputedStyle(each).backgroundColor")

    page.get_by_role("button", name="theme: system").click()
    expect(page.get_by_role("button", name="theme: light")).to_be_visible()
    expect(root).to_have_css(background, light)
    page.get_by_role("button", name="theme: light").click()
    expect(root).not_to_have_css(background, light)
    dark = root.evaluate("each => getComputedStyle(each).backgroundColor")
    page.reload()
    expect(page.get_by_role("button", name="theme: dark")).to_be_visible()
    expect(root).to_have_css(background, dark)


@pytest.mark.parametrize(("width", "whole"), [(70, True), (1000, False)])
def test_lines_end_where_the_text_has_their_ends(tmp_path, look, width, whole):
    """No line is broken between two chunks of tokens, unless it has several hundred of them; no token is lost."""
    (tmp_path / "config.yaml").write_text(CONFIG % (ROOT / "examples/calculator.jsonl", 4000))
    text = "".join("x" * width + "\n" for _line in range(2800 // width))
    ids = AutoTokenizer.from_pretrained(model_dir()).encode(text, add_special_tokens=False)
    record = Trajectory([1])
    record.add_action(ids, [-0.1] * len(ids))
    run = write_run(tmp_path, [build_episode(trajectories=(record,))])
    page = look(run, place="0/episode?key=task-0000/0&view=tokens")
    # The first chunk is there at once; the browser reports which others are near after it has painted.
    page.wait_for_selector(".chunk:nth-child(4) [data-i]")

    last = page.locator(".chunk").evaluate_all("all => all.map(each => each.lastElementChild?.textContent ?? '')")
    ends = [each.endswith("⏎\n") for each in last if each][:-1]
    assert len(ends) > 2
    assert whole == all(ends)
    page.locator(".tokenview").press("End")
    expect(page.locator(f'[data-i="{len(ids)}"]')).to_be_in_viewport()
