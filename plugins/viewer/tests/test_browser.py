"""The page in a real browser. Needs Chromium and Playwright: `apt-get install chromium`, `pip install playwright`."""

import re
from pathlib import Path

import pytest
from viewer_runs import (
    HOSTILE,
    build_episode,
    build_parallel_record,
    mixed_run,
    run_command,
    runs_inline_script,
    write_run,
)

from turnwise.record.trajectory import Trajectory
from turnwise_result_files import TrajectoryWriter

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.one_part]


def test_episodes_are_listed_filtered_and_opened_by_keys(tmp_path, look):
    """The list has every episode; filters narrow it, j and Enter open an episode, and Escape goes back."""
    page = look(mixed_run(tmp_path))
    rows = page.locator("table.episodes tbody tr")
    sync_api.expect(rows).to_have_count(14)

    page.get_by_label("Status").select_option("failed")
    sync_api.expect(rows).to_have_count(1)
    page.get_by_label("Status").select_option("")
    page.keyboard.press("Escape")
    page.locator("#main").focus()
    page.keyboard.press("/")
    page.keyboard.type("answer of task 3")
    page.keyboard.press("Enter")
    sync_api.expect(rows).to_have_count(1)
    page.locator("#search").fill("")
    page.keyboard.press("Enter")
    sync_api.expect(rows).to_have_count(14)

    page.locator("#main").focus()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#heading")).to_contain_text("task-0000/1")
    page.keyboard.press("Escape")
    sync_api.expect(rows).to_have_count(14)


def test_quick_keys_are_each_counted(tmp_path, look):
    """Keys that arrive before the next frame move from the row that the one before chose."""
    page = look(mixed_run(tmp_path))
    sync_api.expect(page.locator("table.episodes tbody tr")).to_have_count(14)

    # A timer between two keys lets the page render; a frame, after which a late listener would register, takes longer.
    page.evaluate("""async () => {
        for (const key of ["j", "j", "j", "k"]) {
            document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
            await new Promise((done) => setTimeout(done));
        }
    }""")
    sync_api.expect(page.locator("tr.chosen")).to_contain_text("task-0000/2")


def test_columns_sort(tmp_path, look):
    """A click at a heading sorts the whole run by that column, and a second one turns the order."""
    page = look(mixed_run(tmp_path))
    first = page.locator("table.episodes tbody tr").first

    page.get_by_role("button", name="reward").click()
    sync_api.expect(first).to_contain_text("task-0005/0")
    page.get_by_role("button", name="reward").click()
    sync_api.expect(first).to_contain_text("task-0000/0")
    assert page.locator("th", has_text="reward").get_attribute("aria-sort") == "ascending"


def test_turns_show_calls_and_answers(tmp_path, look):
    """The conversation has roles, calls and results of tools, and a truncated episode says so."""
    page = look(mixed_run(tmp_path), place="0/episode?key=task-0006/0")

    sync_api.expect(page.locator(".message h2").first).to_contain_text(re.compile("^user", re.IGNORECASE))
    call, result = page.locator(".message.assistant .call"), page.locator(".message.tool")
    sync_api.expect(call).to_contain_text("calculator")
    sync_api.expect(result).to_contain_text("the answer of task 6")
    sync_api.expect(page.locator(".cut")).to_contain_text("truncated")

    for text in (call.locator(".text"), result.locator(".text")):
        sync_api.expect(text).to_be_hidden()
    sync_api.expect(result.locator(".preview")).to_be_visible()
    page.get_by_role("button", name="Unfold tool calls and results").click()
    sync_api.expect(result.locator(".text")).to_be_visible()
    sync_api.expect(result.locator(".preview")).to_be_hidden()
    page.keyboard.press("f")
    sync_api.expect(result.locator(".text")).to_be_hidden()


def test_a_token_shows_everything(tmp_path, look):
    """A token under the pointer shows id, origin, loss, log-probability, version, position and its reward."""
    page = look(mixed_run(tmp_path), place="0/episode?key=task-0000/1&view=tokens")
    page.locator('[data-i="7"]').hover()
    sync_api.expect(page.locator(".detail dd").first).to_have_text("7 of 8")

    names = page.locator(".detail dt").all_inner_texts()
    detail = dict(zip(names, page.locator(".detail dd").all_inner_texts(), strict=True))

    expected = {"id": "9", "origin": "action", "in the loss": "yes", "log-probability": "-1.25000", "position": "7"}
    assert expected.items() <= detail.items()
    assert (detail["weight version"], detail["reward here"], detail["turn"]) == ("4", "1", "2")
    page.locator('[data-i="5"]').hover()
    sync_api.expect(page.locator(".detail dd").first).to_have_text("5 of 8")
    assert page.locator(".detail dd").all_inner_texts()[3:6] == ["observation", "no", "\N{EN DASH}"]


def test_a_link_leads_to_a_token(tmp_path, look):
    """The address of a token opens the episode at that token, and keys move from it."""
    long = Trajectory([1])
    long.add_action([*range(5000)], [-0.1] * 5000)
    run = write_run(tmp_path, [build_episode(trajectories=(long,))])
    page = look(run, place="0/episode?key=task-0000/0&view=tokens&token=4321")

    sync_api.expect(page.locator('[data-i="4321"]')).to_be_in_viewport()
    sync_api.expect(page.locator(".detail dd").first).to_have_text("4321 of 5001")
    page.locator(".tokenview").press("ArrowRight")
    sync_api.expect(page.locator(".detail dd").first).to_have_text("4322 of 5001")
    assert page.url.endswith("token=4322")


def test_long_records_keep_few_elements(tmp_path, look):
    """Of 32,768 tokens, the page has only those near the visible part, at the start and at the end."""
    long = Trajectory([1])
    long.add_action([*range(32767)], [-0.1] * 32767)
    page = look(
        write_run(tmp_path, [build_episode(trajectories=(long,))]), place="0/episode?key=task-0000/0&view=tokens"
    )
    page.wait_for_selector('[data-i="0"]')
    assert page.locator("[data-i]").count() < 6000

    page.locator(".tokenview").press("End")
    sync_api.expect(page.locator('[data-i="32767"]')).to_be_in_viewport()
    assert page.locator("[data-i]").count() < 6000


def test_paths_are_side_by_side_with_their_mask(tmp_path, look):
    """The paths of a block are columns, and the picture hides exactly the siblings of a path."""
    page = look(mixed_run(tmp_path), place="0/episode?key=task-0003/0&view=paths")
    page.wait_for_selector("canvas")
    left, right = page.locator(".path").all()

    assert left.bounding_box()["y"] == right.bounding_box()["y"]
    assert left.bounding_box()["x"] < right.bounding_box()["x"]
    before, summary = page.locator(".paths > div > .run").all()
    assert before.locator(".token").count() == 3
    assert summary.locator(".token").count() == 2
    assert before.bounding_box()["y"] < left.bounding_box()["y"] < summary.bounding_box()["y"]
    # 9 tokens: 3 before the block, two paths of 3 and 1 tokens, 2 after it.
    seen = page.evaluate(
        """() => {
            const canvas = document.querySelector("canvas"), draw = canvas.getContext("2d"), cell = canvas.width / 9;
            const color = (q, k) => [...draw.getImageData((k + 0.5) * cell, (q + 0.5) * cell, 1, 1).data].join();
            const hidden = color(0, 8);
            return [...Array(9).keys()].map((q) => [...Array(9).keys()].map((k) => color(q, k) !== hidden));
        }"""
    )
    record = build_parallel_record()
    expected = [
        [k <= q and (k < record.block_start[q] or k >= record.path_start[q]) for k in range(9)] for q in range(9)
    ]
    assert seen == [[bool(each) for each in row] for row in expected]


def test_records_are_a_tree_with_reasons(tmp_path, look):
    """An episode with branches lists its records as a tree, each with its reason, and a click shows one."""
    page = look(mixed_run(tmp_path), place="0/episode?key=task-0005/0&view=tokens")
    tree = page.locator(".records")

    sync_api.expect(tree.locator("li li")).to_contain_text("history was rewritten")
    sync_api.expect(tree.locator("li li")).to_contain_text("the first 4 from its parent")
    sync_api.expect(tree.locator("li li")).to_contain_text("format 0.25, reward 1")
    facts = dict(
        zip(page.locator(".fact dt").all_inner_texts(), page.locator(".fact dd").all_inner_texts(), strict=True)
    )
    assert (facts["format"], facts["speed"], facts["replicas"]) == ("0.75", "0.125", "1, 3")
    tree.get_by_text("record 1: subagent").click()
    sync_api.expect(page.locator('[data-i="4"]')).to_have_text("7")


def test_groups_mark_missing_variance(tmp_path, look):
    """Groups show each episode's difference from the mean; one with equal rewards is marked."""
    page = look(mixed_run(tmp_path), place="0/groups")
    groups = page.locator(".group")
    sync_api.expect(groups).to_have_count(7)

    sync_api.expect(groups.nth(0)).to_contain_text(re.compile(r"best . worst 1"))
    sync_api.expect(groups.nth(0)).to_contain_text("+0.5")
    assert "no variance" not in groups.nth(0).inner_text()
    sync_api.expect(groups.nth(2)).to_contain_text("no variance")
    groups.nth(0).get_by_text("best beside worst").click()
    sync_api.expect(groups.nth(0).locator(".path")).to_have_count(2)


def test_two_trainings_lie_over_each_other(tmp_path, look):
    """The curves of a second run appear in the same charts; held-out results have intervals; steps link to episodes."""
    runs = [mixed_run(tmp_path / name) for name in ("one", "two")]
    page = look(*runs, place="0/training")
    chart = page.locator(".chart").first
    sync_api.expect(chart.locator("path.line")).to_have_count(4)  # two curves, and their keys

    page.get_by_label("Compare with").select_option("1")

    sync_api.expect(chart.locator("path.line")).to_have_count(8)
    sync_api.expect(page.locator(".heldout")).to_contain_text("0.3 [0.2, 0.4]")
    page.get_by_role("link", name="3", exact=True).click()
    sync_api.expect(page).to_have_url(re.compile(r"#/0/episodes\?step=3&validation=false$"))


def test_time_needs_a_trace_and_says_so(tmp_path, look):
    """Without a trace the page says how to write one, and lists the slowest episodes."""
    page = look(mixed_run(tmp_path), place="0/time")

    sync_api.expect(page.locator(".empty")).to_contain_text("--trace")
    sync_api.expect(page.locator(".lane").first).to_contain_text("task-0006/0")


def test_the_page_follows_a_run_and_its_restart(tmp_path, look):
    """Episodes appear while a run writes them, and after a restart the page has those of the new run."""
    file = tmp_path / "trajectories.parquet"
    first = TrajectoryWriter(file, rows_per_group=1)
    first.write(build_episode(0))
    page = look(tmp_path)
    rows = page.locator("table.episodes tbody tr")
    sync_api.expect(rows).to_have_count(1)

    first.write(build_episode(1))
    sync_api.expect(rows).to_have_count(2)
    first.close()
    file.unlink()
    second = TrajectoryWriter(file, rows_per_group=1)
    second.write(build_episode(7))

    sync_api.expect(rows).to_have_count(1)
    sync_api.expect(rows.first).to_contain_text("task-0007/0")
    second.close()


def test_hostile_text_is_text(tmp_path, look):
    """Markup, scripts, terminal escapes and invisible characters are shown as text in every view, and nothing runs."""
    hostile = {"role": HOSTILE, "content": HOSTILE, "name": HOSTILE, "tool_calls": [{"function": {"name": HOSTILE}}]}
    run = write_run(tmp_path, [build_episode(text=HOSTILE, messages=(hostile,) * 2, agent_name=HOSTILE)])
    key = "task-0000/0"
    page = look(run, place=f"0/episode?key={key}")
    for view in ("turns", "data", "tokens"):
        page.goto(re.sub("#.*", f"#/0/episode?key={key}&view={view}", page.url))
        page.wait_for_selector(f'[aria-current="page"]:text-is("{view.capitalize()}")')
    page.goto(re.sub("#.*", f"#/0/episode?key={key}", page.url))

    text = page.locator(".message .text").first.inner_text()
    assert text == (
        "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
        "\\u202eright to left\\u202c zero\\u200bwidth \\ud800 half \\x1b[31mred\\x1b[0m [link](javascript:alert(1))"
    )
    assert page.locator("main img, main script, main a[href^=javascript]").count() == 0
    assert "owned" not in page.title()


def test_a_line_of_a_megabyte_is_clipped_until_asked_for(tmp_path, look):
    """A line of 1 MB is clipped in the page, and a click shows all of it."""
    run = write_run(tmp_path, [build_episode(text="x" * 1_000_000)])
    page = look(run, place="0/episode?key=task-0000/0")
    tool = page.locator(".message.tool")
    tool.locator("summary").click()
    assert len(tool.locator(".text").inner_text()) < 25_000

    tool.get_by_role("button", name="show all").click()
    sync_api.expect(tool.get_by_role("button", name="show all")).to_have_count(0)

    assert len(tool.locator(".text bdi").text_content()) == 1_000_000


def test_the_policy_blocks_an_inline_script(tmp_path, serve, browser):
    """The browser refuses a script that is put into the page: the content policy is in force."""
    page = browser.new_page()
    page.goto(serve(mixed_run(tmp_path)).url)
    page.wait_for_selector("#heading")

    assert not runs_inline_script(page)
    page.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """The run of `make demo`, with a trace."""
    out = tmp_path_factory.mktemp("demo")
    run_command("rollout", "examples/calculator.yaml", "--out", str(out), "--trace", str(out / "trace.json"))
    return out


def test_the_demo_is_shown(demo, look):
    """A real run: its tokens have texts, special tokens are marked, and its trace is a timeline."""
    page = look(demo, place="0/episodes?sort=num_turns&order=desc")
    page.locator("table.episodes tbody a").first.click()
    page.get_by_role("link", name="Tokens", exact=True).click()
    sync_api.expect(page.locator(".tokenview")).to_contain_text("<|im_start|>")
    assert page.locator(".token.special").count() > 4
    assert page.locator(".token.action").count() > 20
    sync_api.expect(page.locator(".budget")).to_contain_text(re.compile(r"^\s*\d+ of at most [\d,]+ response tokens$"))
    page.get_by_label("Ways to see the episode").get_by_role("link", name="Time").click()
    sync_api.expect(page.locator(".timeline")).to_contain_text("replica 0")
    assert 1 < page.locator(".timeline .generate").count() < 10

    page.get_by_label("Views").get_by_role("link", name="Time").click()
    sync_api.expect(page.locator(".timeline")).to_contain_text("replica 0")
    sync_api.expect(page.locator(".timeline")).to_contain_text("worker")
    sync_api.expect(page.get_by_text("Longest episode:")).to_be_visible()
    page.locator("section > p a").first.click()
    sync_api.expect(page.locator("#heading")).to_contain_text("/")


CURVES = (
    *("reward", "response tokens", "entropy (nats)", "KL of the update", "share of clipped tokens"),
    *("gap to the rollout's log-probabilities", "tool calls per episode", "seconds per stage"),
)


@pytest.mark.parametrize("example", ["train_calculator", "train_torl", "train_parallel"])
def test_a_training_is_shown(tmp_path, look, example):
    """A real training: its curves, the episodes of a step, their advantages, and the text of their tokens."""
    short = ["train.num_steps=2", "train.tasks_per_step=2", "train.validation.limit=2"]
    trace = f"observers=[{{name: trace_file, path: {tmp_path / 'run/trace.json'}}}]"
    run_command("train", f"examples/{example}.yaml", *short, trace, "--out", str(tmp_path / "run"))

    page = look(tmp_path / "run", place="0/training")
    # A curve of two equal rewards has no height, so a browser does not call it visible.
    sync_api.expect(page.locator(".chart").first.locator("path.line").first).to_have_attribute("d", re.compile("^M.*L"))
    assert {*CURVES} <= {*page.locator(".chart figcaption").all_inner_texts()}
    sync_api.expect(page.locator(".heldout tbody tr").first).to_contain_text(re.compile(r"\[.*, .*\]"))
    page.get_by_role("link", name="2", exact=True).click()
    page.locator("table.episodes tbody a").first.click()
    page.get_by_role("link", name="Tokens", exact=True).click()

    sync_api.expect(page.locator(".tokenview")).to_contain_text("<|im_end|>")
    page.locator(".token.action[data-i]").first.hover()
    names = page.locator(".detail dt").all_inner_texts()
    advantage = page.locator(".detail dd").nth(names.index("advantage"))
    sync_api.expect(advantage).to_have_text(re.compile("^[-\N{MINUS SIGN}]?[0-9.e-]+$"))
    page.get_by_role("link", name="Groups").click()
    sync_api.expect(page.locator(".advantage").first).to_contain_text("advantage")

    page.get_by_label("Views").get_by_role("link", name="Time").click()
    longest = page.locator("section > p a").first
    sync_api.expect(longest).to_contain_text("@2")
    page.get_by_role("button", name="all steps").click()
    sync_api.expect(page.locator(".timeline")).to_contain_text("worker 0")
    longest.click()
    sync_api.expect(page.locator("article #heading")).to_be_visible()
    page.get_by_label("Views").get_by_role("link", name="Training").click()
    page.locator(".heldout").get_by_role("link", name="first").click()
    sync_api.expect(page.get_by_label("Kind")).to_have_value("true")
    sync_api.expect(page.locator("table.episodes tbody tr").first).to_contain_text("held out")
