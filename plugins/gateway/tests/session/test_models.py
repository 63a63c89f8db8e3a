"""Names of models: the policy, the policy in records that are never trained, and names that are refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_scenarios import Sessions, as_message, make_call, results_of, user

from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.models import Endpoint
from turnwise_gateway.session.options import SessionOptions

MODELS = {"gpt-4o-mini": "untrained", "claude-haiku-*": "untrained", "o1": "refuse"}
QUESTION = user("Question 0?")


async def ask(session, *messages, **changes):
    answer = await session.answer(make_call(*messages, digest=f"{changes.get('model')} {messages}", **changes))
    answer.confirm()
    return answer.reply


def trained_ids(done):
    """Return the contexts and ids of the trained records, in order."""
    return [
        (record.prompt_ids.tolist(), record.response_ids.tolist(), record.response_mask.tolist())
        for record, line in zip(done.records, done.result.lineage, strict=True)
        if line.trained
    ]


def test_a_cheap_model_is_served_in_records_apart():
    """The same conversation with two models is two records, of which the policy's alone is trained."""

    async def work(session):
        for model in ("gpt-4o-mini", "policy", "claude-haiku-4", "anything"):
            reply = await ask(session, QUESTION, model=model)
            await ask(session, QUESTION, as_message(reply), *results_of(reply), user("And?"), model=model)

    done = Sessions(("An answer of some length.",)).run(work, models=MODELS)

    lines = [(each.kind, each.label, each.parent, each.trained) for each in done.result.lineage]
    assert (
        [
            ("auxiliary", "gpt-4o-mini", 1, False),
            ("main", "", None, True),
            ("auxiliary", "claude-haiku-4", 1, False),
            ("sibling", "sibling", 1, True),  # a name that nobody listed means the policy, which goes on elsewhere
        ]
        == lines[:4]
    )
    assert 2 == done.counts["unlisted_model_calls"]
    assert [2, 2, 2] == [len(record.turns()) for record in done.records[:3]]


def test_a_branch_of_an_untrained_record_is_not_trained():
    """A retry in the middle of a conversation branches, and stays with its model."""

    async def work(session):
        reply = await ask(session, QUESTION, model="gpt-4o-mini")
        for text in ("one", "two"):
            await ask(session, QUESTION, as_message(reply), user(text), model="gpt-4o-mini")
        await ask(session, QUESTION, as_message(reply), user("one"), model="policy")

    done = Sessions(("An answer of some length.",)).run(work, models=MODELS)

    assert [False, False, True] == [each.trained for each in done.result.lineage]
    assert "sibling" == done.result.lineage[1].kind


def test_a_refused_name_is_refused():
    """The sentence has the name and the option, and nothing is sampled."""

    async def work(session):
        with pytest.raises(CallRefusedError, match=r"refuses the model 'o1'.*option models") as caught:
            await ask(session, QUESTION, model="o1")
        assert ("unsupported", "model") == (caught.value.kind, caught.value.param)
        await ask(session, QUESTION, model="policy")

    assert 1 == len(Sessions().run(work, models=MODELS).records)


@settings(deadline=None)
@given(calls=st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.booleans()), min_size=1, max_size=8))
def test_untrained_calls_change_nothing_for_the_policy(calls):
    """The trained records of random conversations are those of the same calls without the other model's."""

    def work(with_others):
        async def converse(session):
            histories = {}
            for is_policy, question, goes_on in calls:
                if not (is_policy or with_others):
                    continue
                model = "policy" if is_policy else "gpt-4o-mini"
                place = (model, question)
                history = histories.get(place) if goes_on else None
                messages = [*history, user("Go on.")] if history else [user(f"Question {question}?")]
                reply = await ask(session, *messages, model=model)
                histories[place] = [*messages, as_message(reply), *results_of(reply)]

        return converse

    sessions = Sessions(("An answer of some length.",))
    both = sessions.run(work(with_others=True), models=MODELS)
    if not any(is_policy for is_policy, *_ in calls):
        assert [] == trained_ids(both)
        return
    assert trained_ids(sessions.run(work(with_others=False), models=MODELS)) == trained_ids(both)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"models": {"policy": "untrained"}}, "'models.policy' must be policy"),
        ({"model": "m", "models": {"m": Endpoint(base_url="http://h/v1")}}, "'models.m' must be policy"),
    ],
)
def test_the_name_of_the_policy_is_the_policys(options, text):
    """Else an agent that calls the model by its own name would never be trained."""
    with pytest.raises(ValueError, match=text):
        SessionOptions(**options)


@pytest.mark.parametrize("url", ["ftp://host/v1", "host/v1", "http://user:secret@host/v1"])
def test_a_wrong_url_is_refused(url):
    """A key in it would be written to logs."""
    with pytest.raises(ValueError, match="base_url"):
        Endpoint(base_url=url)


def test_an_exact_name_wins_over_a_pattern():
    """Then the first pattern in the order of the config counts."""
    options = SessionOptions(models={"*": "untrained", "gpt-*": "refuse", "gpt-5": "policy"})

    found = [options.find_model(name) for name in ("policy", "", "gpt-5", "gpt-4", "other")]
    assert ["policy", "policy", "policy", "untrained", "untrained"] == found
