"""
The fields of requests, and the effect of each; `docs/reference/gateway-fields.md` is made from it.

A field that is not in the list of a dialect is ignored and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import field, frozen

Effect = Literal["served", "wished", "optional", "template", "refused", "ignored"]
EFFECTS: Final[Mapping[Effect, str]] = {
    "served": "the session does what the field says",
    "wished": "served like a request without the field, and counted as `gateway/wished_NAME`",
    "optional": "refused, `wished` or constrained: the agent's option `structured_output` decides",
    "template": "changes nothing if the run's `model.template_options` has the same value, and is refused if not",
    "refused": "400, with the name of the field",
    "ignored": "changes nothing, and counted as `gateway/ignored_NAME`",
}
"""The meaning of each effect."""


@frozen(kw_only=True)
class FieldRule:
    """
    The effect of a field.

    Attributes:
        name: path of the field in a request.
        effect: of a value that is not neutral.
        example: such a value.
        neutral: values that change nothing, besides null.
        form: the values that the rule is about, where a field has several rules.
        reason: of a refusal, where it holds for all values but neutral ones; empty where the dialect decides.
        counted: name in the metrics, where it is another one.
        beside: further fields of the object that has the field, which it needs.
    """

    name: str
    effect: Effect
    example: Any
    neutral: tuple[Any, ...] = ()
    form: str = ""
    reason: str = ""
    counted: str = ""
    beside: Mapping[str, Any] = field(factory=dict)

    def is_neutral(self, value: object) -> bool:
        """Return whether a value changes nothing."""
        # In Python a flag equals a number.
        known = (each for each in self.neutral if isinstance(each, bool) == isinstance(value, bool))
        return value is None or any(value == neutral for neutral in known)

    def body(self, value: object) -> dict[str, Any]:
        """Return the part of a request that gives the field a value."""
        *owners, key = self.name.split(".")
        body = {**self.beside, key: value}
        for owner in reversed(owners):
            body = {owner: body}
        return body


Values = Mapping[str, tuple[Any, ...]]
"""By the name of a field: a value that has an effect, then the values without one."""


def refuse_all(reason: str, values: Values) -> tuple[FieldRule, ...]:
    """Return the rules of fields that no value but a neutral one may have."""
    return tuple(
        FieldRule(name=name, effect="refused", example=example, neutral=tuple(neutral), reason=reason)
        for name, (example, *neutral) in values.items()
    )


def serve(name: str, example: object, *neutral: object, form: str = "") -> FieldRule:
    """Return the rule of a field that is served."""
    return FieldRule(name=name, effect="served", example=example, neutral=neutral, form=form)


def ignore(values: Mapping[str, object]) -> tuple[FieldRule, ...]:
    """Return the rules of fields without effect, each with a value."""
    return tuple(FieldRule(name=name, effect="ignored", example=example) for name, example in values.items())


REFUSED: Final = (
    *refuse_all(
        "the session samples as the run says",
        {
            "allowed_token_ids": ([5], []),
            "audio": ({"voice": "a"},),
            "bad_words": (["a"], []),
            "best_of": (2, 1),
            "custom_logit_processor": ("a",),
            "ebnf": ("root ::= [a-z]",),
            "frequency_penalty": (0.1, 0),
            "function_call": ({"name": "add"},),
            "functions": ([{}], []),
            "grammar": ("root ::= [a-z]",),
            "guided_choice": (["a"],),
            "guided_grammar": ("root ::= [a-z]",),
            "guided_json": ({},),
            "guided_regex": ("[a-z]",),
            "ignore_eos": (True, False),
            "json_schema": ("{}",),
            "length_penalty": (2, 1),
            "logit_bias": ({"5": 1}, {}),
            "logits_processors": (["a"], []),
            "min_new_tokens": (3, 0),
            "min_p": (0.1, 0),
            "min_tokens": (3, 0),
            "modalities": (["text", "audio"], ["text"]),
            "n": (2, 1),
            "presence_penalty": (0.1, 0),
            "regex": ("[a-z]",),
            "repetition_penalty": (1.1, 1),
            "stop_regex": ("[a-z]", []),
            "stop_token_ids": ([5], []),
            "structural_tag": ("{}",),
            "structured_outputs": ({"regex": "[a-z]"},),
            "thinking_budget": (9,),
            "thinking_token_budget": (9,),
            "typical_p": (0.5, 1),
            "use_beam_search": (True, False),
        },
    ),
    *refuse_all(
        "the run renders the prompt",
        {
            "add_special_tokens": (True, False),
            "chat_template": ("{{ messages }}",),
            "documents": ([{"text": "a"}], []),
            "truncate_prompt_tokens": (9, -1),
        },
    ),
    *refuse_all(
        "the model begins each turn itself",
        {"add_generation_prompt": (False, True), "continue_final_message": (True, False)},
    ),
    *refuse_all(
        "a reply has the text and the log-probabilities of the sampled tokens alone",
        {
            "echo": (True, False),
            "include_stop_str_in_output": (True, False),
            "prompt_logprobs": (1,),
            "return_token_ids": (True, False),
            "return_tokens_as_token_ids": (True, False),
            "top_logprobs": (5, 0),
        },
    ),
)
"""Fields of OpenAI, vLLM and SGLang that no dialect serves: they would change the sampled tokens or the reply."""

FOREIGN_FORMAT: Final = "this API has another field for the format of a reply"
FOREIGN_FORMATS: Final = tuple(
    FieldRule(
        name="response_format",
        form=f"`{kind}`",
        effect="refused",
        example={"type": kind},
        neutral=({"type": "text"},),
        reason=FOREIGN_FORMAT,
    )
    for kind in ("json_object", "json_schema")
)
"""The field of Chat Completions, in the other dialects."""

SAMPLING: Final = ignore({"seed": 3, "temperature": 0.5, "top_k": 5, "top_p": 0.9})
"""Sampling parameters that the run sets itself."""

TEMPLATE_OPTIONS: Final = (
    FieldRule(name="chat_template_kwargs", effect="template", example={"enable_thinking": False}, neutral=({},)),
    FieldRule(name="enable_thinking", effect="template", example=False),
)


@frozen
class FieldTable:
    """
    The rules of a dialect. A field without a rule is ignored; other forms of a field with rules are refused.

    Attributes:
        rules: in the order of the documentation.
        refused: the rules with a reason, by the name of the field.
    """

    rules: tuple[FieldRule, ...]
    refused: Mapping[str, FieldRule] = field(init=False)

    @refused.default
    def _find_refused(self) -> Mapping[str, FieldRule]:
        return {each.name: each for each in self.rules if each.reason}

    def effect_of(self, name: str, form: str) -> Effect:
        """Return the effect of a field that another dialect has a rule for."""
        found = {(rule.name, rule.form): rule.effect for rule in self.rules}
        owner, _, rest = name.partition(".")
        known = next((found[key] for key in ((name, form), (name, ""), (owner, "")) if key in found), None)
        if known is not None:
            return known
        return "refused" if not rest and any(rule.name == name for rule in self.rules) else "ignored"
