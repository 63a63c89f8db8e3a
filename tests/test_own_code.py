"""Runs with the user's own code as parts: files, modules and objects, in one process and on Ray."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise import Episode, EpisodeResult, RolloutManager, Status, load_config, load_resolved
from turnwise.cli import main
from turnwise.config.file import dump_yaml, with_absolute_paths
from turnwise.errors import ConfigError, DataError, PluginError
from turnwise_result_files import TrajectoryWriter, read_results
from turnwise_task_files import load_tasks
from turnwise_testing.whole_runs.scripted_run import PLUGIN, SITE, write_scripted_run

OWN = """
from attrs import frozen

from turnwise import Reply, State, TrajectoryScore
from turnwise_plain_functions import reward, tool


class Talker:
    \"\"\"Calls the tool and asks the user, then samples.\"\"\"

    def __init__(self, resources, greeting="hello"):
        self.chat, self.greeting, self.tools = resources.chat, greeting, tuple(resources.tools)

    async def step(self, episode):
        from turnwise import ToolCall

        result = await episode.call_tool(ToolCall(name="double", arguments={"number": 21}))
        answer = await episode.interact()
        episode.messages.append({"role": "user", "content": f"{self.greeting} {result.text} {answer.content}"})
        episode.begin(self.chat.prompt(episode.messages))
        await episode.generate(max_tokens=4)
        return State.TERMINATED


class Counted:
    @frozen
    class Config:
        \"\"\"Options of the reward.\"\"\"

        factor: float = 1.0

    def __init__(self, config, resources):
        self.config = config

    def score(self, episode):
        return TrajectoryScore(value=self.config.factor * len(episode.messages))


async def talk(episode, resources, greeting="hello"):
    await Talker(resources, greeting).step(episode)


def length(episode, factor=1.0):
    return factor * len(episode.messages[-1]["content"])


@reward
async def waits(episode):
    return 0.5


def double(number: int) -> int:
    \"\"\"Double a number.\"\"\"
    return 2 * number


@tool(name="double")
def decorated(number: int) -> str:
    \"\"\"Double a number.\"\"\"
    return f"{2 * number}"


def user(messages, word="bye"):
    return f"{word} after {len(messages)}"


def marks(batch, value=7):
    import torch

    return {"mark": torch.full((len(batch),), value)}


def whole(episodes, factor=1.0):
    return [factor * len(episodes)] * len(episodes)


async def waits_for_all(episodes, resources):
    return [0.5 + resources.seed] * len(episodes)


NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run and the file `own.py`, and the module `own_module` with the same code."""
    write_scripted_run(tmp_path, num_tasks=2, plugins=[PLUGIN, "plain_functions"])
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    (tmp_path / SITE / "own_module.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / SITE)
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    return tmp_path


def overrides_of(home: str, **changes: str) -> list[str]:
    """Return overrides that take every part from a module or a file."""
    parts = {
        "modules": f"[{home}]",
        "agent": f"{{name: '{home}:Talker', greeting: hi}}",
        "reward": f"{{name: '{home}:length', factor: 2}}",
        "interaction": f"{{name: '{home}:user', word: good bye}}",
        "tools": f"['{home}:double']",
        "postprocessors": f"[{{name: '{home}:marks', value: 9}}]",
    }
    return [f"{key}={value}" for key, value in {**parts, **changes}.items()]


def texts(results: list[EpisodeResult]) -> set[str]:
    """Return the last messages of episodes, none of which has failed."""
    assert {each.status for each in results} <= {Status.COMPLETED, Status.TRUNCATED}, [each.fault for each in results]
    return {str(each.messages[-1]["content"]) for each in results}


def scores(results: list[EpisodeResult]) -> set[float]:
    """Return the scores of episodes."""
    return {score.value for each in results for score in each.scores}  # type: ignore[union-attr]  # trajectory scores


@pytest.mark.parametrize("home", ["./own.py", "own_module"])
def test_parts_of_a_file_or_a_module(folder: Path, home: str) -> None:
    """A class and functions are an agent, a reward, a tool, a simulated user and a postprocessor, with options."""
    config = load_config(folder / "run.yaml", overrides_of(home))
    with RolloutManager.from_config(config) as manager:
        results = manager.rollout(load_tasks(config))
        batch = manager.collate(results)

    assert texts(results) == {"hi 42 good bye after 1"}
    assert scores(results) == {2.0 * len("hi 42 good bye after 1")}
    assert set(batch.fields["mark"].tolist()) == {9}


@pytest.mark.parametrize(
    ("part", "expected"), [("Counted", {2.0}), ("{name: 'HOME:Counted', factor: 3}", {6.0}), ("waits", {0.5})]
)
def test_rewards_of_every_form(folder: Path, part: str, expected: set[float]) -> None:
    """A class with a config like a plugin's, and a decorated function."""
    chosen = part.replace("HOME", "./own.py") if "{" in part else f"./own.py:{part}"
    config = load_config(folder / "run.yaml", overrides_of("./own.py", reward=chosen))
    with RolloutManager.from_config(config) as manager:
        assert expected == scores(manager.rollout(load_tasks(config)))


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("./own.py:whole", {4.0}),
        ("{name: './own.py:whole', factor: 3, min_fraction: 1.0, deadline_s: 60}", {12.0}),
        ("./own.py:waits_for_all", {5.5}),
    ],
)
def test_a_function_is_a_group_reward(folder: Path, part: str, expected: set[float]) -> None:
    """It gets the whole group; the options of group rewards are not its own."""
    changes = [*overrides_of("./own.py", group_reward=part), "rollout.n=4", "rollout.seed=5"]
    config = load_config(folder / "run.yaml", changes)
    with RolloutManager.from_config(config) as manager:
        assert expected == scores(manager.rollout(load_tasks(config)))


def test_a_program_passes_a_group_reward(folder: Path) -> None:
    """A function of a notebook sees the scores of the run's reward."""
    config = load_config(folder / "run.yaml", ["rollout.n=4"])
    ranks = lambda group: [sum(other.reward < each.reward for other in group) for each in group]  # noqa: E731 - a notebook's
    with RolloutManager.from_config(config, group_reward=ranks) as manager:
        results = manager.rollout(load_tasks(config))

    assert {"group_size", "episode_reward"} <= results[0].metrics.extra.keys()
    assert {0.0} <= scores(results) <= {0.0, 1.0, 2.0, 3.0}


def test_a_group_reward_of_a_program_travels_to_reward_workers(folder: Path) -> None:
    """A reward worker builds the function that a notebook has passed."""
    from turnwise.config.own_code import place_parts
    from turnwise.plugin.host import load
    from turnwise.runtime.ray.blueprint import ConfigBlueprint

    bonus = 3.0
    overrides = ["runtime=ray", "runtime.reward_workers=1", "reward=null"]
    config, given = place_parts(
        load_config(folder / "run.yaml", overrides), {"group_reward": lambda group: [bonus + len(group)] * len(group)}
    )
    reward = pickle.loads(pickle.dumps(ConfigBlueprint.of(config, load(), given))).make_group_reward()
    assert [4.0] == reward.score_group([None])


def test_a_wrong_option_of_a_group_reward_is_named(folder: Path) -> None:
    """Of the function, or of every group reward."""
    for option, text in (("factr: 3", "options do not fit"), ("min_fraction: 3", "min_fraction")):
        changes = overrides_of("./own.py", group_reward=f"{{name: './own.py:whole', {option}}}")
        with pytest.raises(ConfigError, match=text):
            RolloutManager.from_config(load_config(folder / "run.yaml", changes))


def test_a_resumed_group_is_scored_with_its_earlier_members(folder: Path) -> None:
    """`turnwise rollout --resume` gives the group reward the members that the folder holds."""
    out = folder / "out"
    overrides = [*overrides_of("./own.py", group_reward="./own.py:whole"), "rollout.n=4"]
    assert main(["rollout", str(folder / "run.yaml"), "--out", str(out), *overrides]) == 0
    path = out / "trajectories.parquet"
    results = list(read_results(path))
    lost = results[0]
    path.unlink()
    with TrajectoryWriter(path) as writer:
        for result in results[1:]:
            writer.write(result)
    (out / "metrics.json").unlink()

    assert main(["rollout", "--resume", str(out)]) == 0
    (again,) = [each for each in read_results(path) if each.uid == lost.uid]
    assert again.metrics.extra["group_size"] == lost.metrics.extra["group_size"] == 4
    assert again.reward == 4.0


def test_objects_of_a_program(folder: Path) -> None:
    """A notebook passes its own functions and objects; they replace the parts of the config."""
    import own_module  # type: ignore[import-not-found]  # the fixture writes it

    config = load_config(folder / "run.yaml")
    parts = {"tools": [own_module.decorated], "interaction": lambda _messages: "lambda", "reward": own_module.Counted}
    with RolloutManager.from_config(
        config, agent=own_module.talk, postprocessors=[own_module.marks], **parts
    ) as manager:
        results = manager.rollout(load_tasks(config))
        batch = manager.collate(results)

    assert texts(results) == {"hello 42 lambda"}
    assert scores(results) == {2.0}
    assert set(batch.fields["mark"].tolist()) == {7}
    assert {"object:talk"} == {each.agent_name for each in results}


def test_none_removes_a_part(folder: Path) -> None:
    """Without a reward there are no scores."""
    config = load_config(folder / "run.yaml")
    with RolloutManager.from_config(config, reward=None) as manager:
        assert set() == scores(manager.rollout(load_tasks(config)))


def test_a_changed_file_is_imported_again(folder: Path) -> None:
    """A notebook user edits the file and starts the run again."""
    overrides = overrides_of("./own.py")
    for word in ("one", "three"):
        (folder / "own.py").write_text(OWN.replace("{word} after", word), encoding="utf-8")
        config = load_config(folder / "run.yaml", overrides)
        with RolloutManager.from_config(config) as manager:
            assert texts(manager.rollout(load_tasks(config))) == {f"hi 42 {word} 1"}


@pytest.mark.parametrize("line", ["from . import more", "from .more import x", "from .. import more"])
def test_a_relative_import_says_so(folder: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    """A file is in no package; the error names the relative import, and not a module that nobody asked for."""
    (folder / "own.py").write_text(f"{line}\n", encoding="utf-8")

    assert main(["rollout", str(folder / "run.yaml"), *overrides_of("./own.py"), "--out", str(folder / "o")]) == 2
    assert "attempted relative import with no known parent package" in capsys.readouterr().err


def test_a_recorded_config_names_the_same_parts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run that resumes from its recorded config, in another folder, has the agents of the first run."""
    config, host = load_resolved(folder / "run.yaml", overrides_of("./own.py"))
    file = tmp_path_factory.mktemp("out") / "config.yaml"
    file.write_text(dump_yaml(with_absolute_paths(config)), encoding="utf-8")
    again, _ = load_resolved(file)
    assert (again.agent, again.reward, again.tools, again.modules) == (
        config.agent,
        config.reward,
        config.tools,
        config.modules,
    )

    names = set()
    for each in (config, again):
        with RolloutManager.from_config(each, host) as manager:
            names |= {result.agent_name for result in manager.rollout(load_tasks(each))}
    assert names == {f"{folder}/own.py:Talker"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reward": "./gone.py:f"}, "reward: FOLDER/gone.py:f: No such file or directory"),
        ({"reward": "./bad.py:f"}, "reward: FOLDER/bad.py:f: cannot be imported: ZeroDivisionError: "),
        ({"reward": "./own.py:lenght"}, "reward: FOLDER/own.py:lenght: there is no 'lenght'; did you mean 'length'?"),
        ({"reward": "./own.py:NUMBER"}, "reward: FOLDER/own.py:NUMBER: it is int, which has no score; expected"),
        ({"reward": "./own.py:Talker"}, "it is Talker, which has no score; expected turnwise.Reward"),
        ({"agent": "./own.py:Counted"}, "agent: FOLDER/own.py:Counted: it is Counted, which has no step"),
        ({"agent": "./own.py:length"}, "agent: FOLDER/own.py:length: an agent's function must be async"),
        ({"agent": "{name: './own.py:Talker', greting: x}"}, "got an unexpected keyword argument 'greting'"),
        ({"reward": "{name: './own.py:length', factr: 2}"}, "got an unexpected keyword argument 'factr'"),
        ({"reward": "{name: './own.py:Counted', factr: 2}"}, "Counted: factr: unknown key; did you mean 'factor'?"),
        ({"reward": "{name: './own.py:Counted', factor: x}"}, "Counted: factor: expected a number, got 'x'"),
        ({"tools": "[{name: './own.py:double', run: x}]"}, "double': run: unknown key; did you mean 'run_in'"),
        ({"tools": "['./own.py:user']"}, "tool 'user': parameter 'messages' has no type annotation"),
        ({"tools": "[{name: './own.py:double', run_in: process}]"}, "cannot run in a process: it is no function"),
        ({"interaction": "./own.py:Counted"}, "it is Counted, which has no create, release, respond"),
        (
            {"postprocessors": "[./own.py:NUMBER]"},
            "postprocessors.0: FOLDER/own.py:NUMBER: it is int",
        ),
        ({"reward": "./own.py:TrajectoryScore"}, "module 'turnwise.types' is not allowed; list it in modules"),
    ],
)
def test_an_error_is_one_line(folder: Path, changes: dict[str, str], expected: str) -> None:
    """It names the place in the config, the place of the code, and the problem; no engine starts."""
    (folder / "bad.py").write_text("1 / 0\n", encoding="utf-8")
    overrides = overrides_of("./own.py", **{"modules": "[./own.py, bad.py, ./gone.py]", **changes})
    config = load_config(folder / "run.yaml", overrides)
    with pytest.raises((ConfigError, PluginError)) as caught:
        RolloutManager.from_config(config)

    assert expected.replace("FOLDER", str(folder)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_that_is_not_listed_never_runs(folder: Path) -> None:
    """Each part is named in its line, and nothing is imported; a data file can only name agents of the config."""
    (folder / "own.py").write_text("raise SystemExit\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_resolved(folder / "run.yaml", overrides_of("./own.py", modules="[own]"))
    ending = ": file './own.py' is not allowed; list it in modules, which holds own"
    lines = str(caught.value).splitlines()
    assert all(line.endswith(ending) for line in lines)
    found = {line.removesuffix(ending).rpartition(" ")[2] for line in lines}
    assert found == {"agent", "reward", "interaction", "tools.0", "postprocessors.0"}

    config = load_config(folder / "run.yaml", ["modules=[./own.py]"])
    (folder / "data.jsonl").write_text(
        '{"agent_name": "./own.py:Talker", "messages": [{"role": "user", "content": "x"}]}\n', encoding="utf-8"
    )
    with (
        RolloutManager.from_config(config) as manager,
        pytest.raises(DataError, match=r"names the unknown agent './own.py:Talker'"),
    ):
        manager.rollout(load_tasks(config))


@pytest.fixture
def ray_with_site(ray_head: str, folder: Path) -> Iterator[None]:
    """A connection to Ray whose workers find the plugin of the run."""
    import ray
    from actor_coverage import make_runtime_env

    ray.init(address=ray_head, namespace="turnwise", runtime_env=make_runtime_env(folder / SITE))
    yield
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_with_site")
def test_own_code_on_ray(folder: Path) -> None:
    """Files are read in the workers, and objects travel to them: the results are those of one process."""
    found = {}
    for runtime in ("local", "ray"):
        config = load_config(folder / "run.yaml", [*overrides_of("./own.py"), f"runtime={runtime}"])
        bonus = 3.0

        def score(episode: Episode, bonus: float = bonus) -> float:
            return bonus + len(episode.messages[-1]["content"])

        with RolloutManager.from_config(config, reward=score, interaction=lambda _messages: "object") as manager:
            results = manager.rollout(load_tasks(config))
        assert texts(results) == {"hi 42 object"}
        found[runtime] = sorted((each.uid, each.trajectories[0].input_ids.tolist()) for each in results)
        assert scores(results) == {3.0 + len("hi 42 object")}
    assert found["ray"] == found["local"]


def test_what_does_not_pickle_is_one_line(folder: Path) -> None:
    """It is found before any actor starts."""
    import threading

    lock = threading.Lock()
    config = load_config(folder / "run.yaml", ["runtime=ray"])
    with pytest.raises(ConfigError, match=r"^object:<lambda>: cannot be sent to Ray's workers: TypeError: "):
        RolloutManager.from_config(config, reward=lambda _episode: lock.locked())
