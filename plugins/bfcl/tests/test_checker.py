"""The rules by which calls are compared with possible answers, and the leaderboard's own checker."""

import random
from collections import Counter

import pytest
from bfcl_inputs import tasks_of
from bfcl_mutations import mutate, right_calls
from bfcl_original import importable, load_checker, load_tools
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import DataError
from turnwise_bfcl.checker import Call, check_calls
from turnwise_bfcl.data_files import fetch_wheel, read_answers, read_questions
from turnwise_bfcl.multi_turn import CATEGORIES as MULTI_TURN
from turnwise_bfcl.multi_turn import read_functions
from turnwise_bfcl.schemas import parameter_types, tool_schema
from turnwise_bfcl.source import CATEGORIES, WITHOUT_ANSWERS

BREW = {"drink": "green tea", "litres": 0.5}
SEEDS = 40
"""Mutations of each task; some 100,000 in all."""


def is_right(task, *calls):
    return check_calls(task.extra["bfcl"]["functions"], [Call(*call) for call in calls], task.ground_truth)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"drink": "Green-Tea."}, True),
        ({"drink": "green tea!"}, False),
        ({"drink": ["green tea"]}, False),
        ({"sugar": 0, "milk": False}, True),
        ({"sugar": 0.0}, False),
        ({"sugar": False}, False),
        ({"milk": 0}, False),
        ({"litres": 1}, False),
        ({"litres": 10**400}, False),
        ({"unknown": 1}, False),
        ({"litres": None}, False),
    ],
)
def test_arguments(changes, expected):
    """Types are strict, texts are not, and optional parameters may be left out."""
    (task, *_) = tasks_of("simple_python")
    assert is_right(task, ("kitchen.brew", BREW | changes)) == expected


def test_required_parameters_and_names():
    """None may lack, and a name must be the same."""
    (task, *_) = tasks_of("simple_python")
    assert not is_right(task, ("kitchen.brew", {"drink": "green tea"}))
    assert not is_right(task, ("kitchen_brew", BREW))
    assert not is_right(task)
    assert not is_right(task, ("kitchen.brew", BREW), ("kitchen.brew", BREW))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"parts": [2, 3], "options": {"speed": 2}}, True),
        ({"parts": [2, 3], "options": {"speed": 2.0, "bowl": "GLASS"}}, True),
        ({"parts": [3, 2], "options": {"speed": 2}}, False),
        ({"parts": [2, 3.0], "options": {"speed": 2}}, False),
        ({"parts": [2, 3], "options": {"bowl": "glass"}}, False),
        ({"parts": [2, 3], "options": {"speed": 2, "lid": True}}, False),
        ({"parts": [2, 3], "options": {"speed": 2}, "names": ["A", "b."]}, True),
        ({"parts": [2, 3], "options": {"speed": 2}, "label": "x"}, False),
        ({"parts": [2, 3]}, False),
    ],
)
def test_lists_and_objects(arguments, expected):
    """Lists are compared element by element, objects key by key."""
    (_, task, _) = tasks_of("simple_python")
    assert is_right(task, ("mix", arguments)) == expected


def test_lists_of_objects():
    """In their order, with keys that may be left out."""
    (task,) = tasks_of("multiple")
    ann, bob = {"name": "ANN", "age": 7}, {"name": "Bob"}
    assert is_right(task, ("plan_guests", {"guests": [ann, bob]}))
    assert not is_right(task, ("plan_guests", {"guests": [bob, ann]}))
    assert not is_right(task, ("plan_guests", {"guests": [ann]}))
    assert not is_right(task, ("plan_guests", {"guests": [ann, "Bob"]}))


def test_parallel_calls_come_in_any_order():
    """Each answer takes one call."""
    (task,) = tasks_of("parallel")
    tea, coffee = (("kitchen.brew", {"drink": drink, "litres": 1}) for drink in ("tea", "coffee"))
    assert is_right(task, tea, coffee)
    assert is_right(task, coffee, tea)
    assert not is_right(task, tea, tea)
    assert not is_right(task, tea)


def test_calls_that_are_equal_in_numbers_alone_are_two_calls():
    """1 and 1.0 are equal in Python, and an integer has no point here."""
    functions = {"f": {"required": [], "types": {"n": {"type": "integer", "elements": None}}}}
    calls = [Call("f", {"n": 5.0}), Call("f", {"n": 5})]
    answers = [{"f": {"n": [5]}}] * 2
    assert not check_calls(functions, calls, answers)
    assert not check_calls(functions, calls[::-1], answers)
    assert check_calls(functions, [calls[1]] * 2, answers)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["drink", "litres", "sugar", "milk", "parts", "names", "options", "label", "guests"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["kitchen.brew", "mix", "plan_guests", "f"]),
            st.dictionaries(st.sampled_from(NAMES), json_values),
        ),
        max_size=3,
    )
)
def test_any_calls_are_right_or_wrong(calls):
    """Whatever a model writes, the check answers."""
    for task in tasks_of("simple_python,multiple,parallel"):
        assert is_right(task, *calls) in (True, False)


@pytest.fixture(scope="module")
def wheel():
    """The leaderboard's wheel; without it these tests are skipped, and the summary says why."""
    try:
        return fetch_wheel()
    except DataError as error:
        pytest.skip(f"needs the wheel of bfcl-eval from the package index: {error}")


@pytest.fixture
def package(wheel, tmp_path):
    """The leaderboard's package, importable."""
    with importable(wheel, tmp_path):
        yield


def entries():
    """Yield the category, functions, answers and id of each task that has answers."""
    for category in CATEGORIES:
        if category in (*WITHOUT_ANSWERS, *MULTI_TURN):
            continue
        answers = {each["id"]: each["ground_truth"] for each in read_answers(category, None)}
        for entry in read_questions(category, None):
            yield category, entry["function"], answers[entry["id"]], entry["id"]


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_verdicts_equal_those_of_the_original():
    """On right answers of all categories and on mutations of them."""
    original, seen, differing = load_checker(), Counter(), []
    for category, functions, answers, name in entries():
        types = {each["name"]: parameter_types(each) for each in functions}
        rng = random.Random(name)
        for number in range(SEEDS):
            calls = right_calls(answers, rng)
            calls = mutate(calls, rng) if number else calls
            theirs = original(functions, calls, answers, category)
            ours = check_calls(types, [Call(*item) for call in calls for item in call.items()], answers)
            seen[theirs] += 1
            if theirs != ours:
                differing.append((name, theirs, calls))
    assert differing == []
    assert min(seen[True], seen[False]) > 10_000


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_schemas_equal_those_of_the_original():
    """But for types that are nested deeper than the original translates."""
    translate, differing = load_tools(), []
    of_tasks = [
        function
        for category in CATEGORIES
        if category not in MULTI_TURN
        for entry in read_questions(category, None)
        for function in entry["function"]
    ]
    of_programs = [function for functions in read_functions(None).values() for function in functions]
    assert len(of_programs) == 128
    for function in (*of_tasks, *of_programs):
        ours, theirs = tool_schema(function)["function"], translate(function)
        if theirs != ours:
            differing.append((function["name"], theirs, ours))
    assert differing == []
