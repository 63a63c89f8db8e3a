"""Empty assistant messages that clients add, beside prompts that repeat a conversation."""

from session_scenarios import Sessions, as_message, make_call, user


def test_a_prompt_with_the_same_texts_hides_no_turn():
    """
    A conversation is found in the record that sampled its turns, also after a prompt has repeated its texts.

    The prompt came from a client that changed a turn, and that keeps an empty message which its request had.
    """
    empty = {"role": "assistant", "content": ""}

    async def agent(session):
        async def ask(*messages):
            answer = await session.answer(make_call(*messages))
            answer.confirm()
            return answer.reply, session.book.records[answer.reply.provenance["record"]].trajectory.input_ids.tolist()

        first, _context = await ask(user("Question 0?"))
        messages = [user("Question 0?"), as_message(first), user("Go on."), empty]
        second, context = await ask(*messages)
        messages += [as_message(second), user("Go on.")]
        await ask(*messages, {**empty, "content": "Somebody else's turn."}, user("And now?"))
        _third, longer = await ask(*messages)
        assert context == longer[: len(context)]

    Sessions(turns=("The answer is 42.",)).run(agent)
