"""Refuses requests that the options of the session, the chat template or the engine exclude."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from turnwise.errors import BoundaryError, GrammarError
from turnwise.types import Capabilities
from turnwise_gateway.calls import CallRefusedError, Constraint, ModelCall
from turnwise_gateway.session.parts import SessionParts


def check_request(call: ModelCall, parts: SessionParts) -> None:
    """Refuse a call that the options of the session exclude; `CallRefusedError` names the field."""
    if parts.options.find_model(call.model) == "refuse":
        text = f"'model' is not supported: the run refuses the model {call.model!r}, see the option models"
        raise CallRefusedError("unsupported", text, param="model")
    for path, value in call.template_options.items():
        _check_template_option(path, value, parts.template_options)
    if parts.options.structured_output == "refuse":
        for constraint in call.constraints:
            if constraint.is_optional:
                raise _refuse_constraint(constraint)


def check_stop(call: ModelCall, engine: Capabilities) -> None:
    """Refuse a call with stop strings that the engine cannot honour."""
    if call.stop and not engine.stop_strings:
        text = f"'{call.stop_param}' is not supported: the engine cannot end a turn at a string"
        raise CallRefusedError("unsupported", text, param=call.stop_param)


async def constrain(call: ModelCall, parts: SessionParts, engine: Capabilities) -> ModelCall:
    """Return a call with the grammar of its turn; `CallRefusedError` if the run or its engine has none for it."""
    if (writer := parts.grammars) is None or (grammar := writer.write(call)) is None:
        return call
    if not engine.grammars:
        param = call.constraints[0].param
        text = f"'{param}' is not supported: the engine of the run has no grammars, see structured_output"
        raise CallRefusedError("unsupported", text, param=param)
    await writer.check(call)
    return evolve(call, grammar=grammar)


def refuse_grammar(error: Exception, call: ModelCall) -> CallRefusedError | None:
    """Return the refusal of a call whose grammar has failed in the engine; None for an error of another kind."""
    cause = error.cause if isinstance(error, BoundaryError) else error
    if call.grammar is None or not isinstance(cause, GrammarError):
        return None
    param = next(each.param for each in call.constraints if each.kind != "one_call")
    text = f"'{param}' asks for a form that the engine cannot keep a turn to: {cause}"
    return CallRefusedError("grammar", text, param=param)


def _check_template_option(path: str, value: object, own: Mapping[str, object]) -> None:
    name = path.removeprefix("chat_template_kwargs.")
    if name in own and own[name] == value:
        return
    given = f"has {own[name]!r}" if name in own else f"has no {name!r}"
    text = f"'{path}' is not supported: the run's `model.template_options` {given}, so set it there for all requests"
    raise CallRefusedError("unsupported", text, param=path)


def _refuse_constraint(constraint: Constraint) -> CallRefusedError:
    text = (
        f"'{constraint.param}' is not supported: the session samples as the run says; with the agent's option "
        "`structured_output: wish` it is served, and nothing constrains the sampling; with `constrain` a grammar does"
    )
    return CallRefusedError("unsupported", text, param=constraint.param)
