"""The effect of each field in each dialect."""

from __future__ import annotations

from typing import Final

from turnwise_gateway.dialects.field_rules import (
    FOREIGN_FORMAT,
    FOREIGN_FORMATS,
    REFUSED,
    SAMPLING,
    TEMPLATE_OPTIONS,
    FieldRule,
    FieldTable,
    ignore,
    refuse_all,
    serve,
)

CHAT_FIELDS: Final = FieldTable(
    (
        serve("messages", [{"role": "user", "content": "Hi."}]),
        serve("model", "policy"),
        serve("tools", [{"type": "function", "function": {"name": "add"}}]),
        serve("max_tokens", 9),
        serve("max_completion_tokens", 9),
        serve("stop", ["a"], []),
        serve("logprobs", True, False),
        serve("stream", True, False),
        serve("stream_options.include_usage", True, False),
        serve("tool_choice", "none", "auto", form="`auto`, `none`"),
        FieldRule(
            name="tool_choice",
            form="`required`",
            effect="wished",
            example="required",
            counted="tool_choice_required",
        ),
        FieldRule(
            name="tool_choice",
            form="one tool",
            effect="optional",
            example={"type": "function", "function": {"name": "add"}},
            counted="tool_choice_named",
        ),
        FieldRule(
            name="tool_choice",
            form="`allowed_tools`",
            effect="optional",
            example={
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]},
            },
            counted="tool_choice_allowed",
        ),
        FieldRule(name="parallel_tool_calls", effect="wished", example=False, neutral=(True,)),
        FieldRule(name="response_format", form="`json_object`", effect="optional", example={"type": "json_object"}),
        FieldRule(
            name="response_format",
            form="`json_schema`",
            effect="optional",
            example={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
            neutral=({"type": "text"},),
        ),
        *refuse_all(FOREIGN_FORMAT, {"output_format": ({"type": "json_schema", "schema": {}},)}),
        *TEMPLATE_OPTIONS,
        *SAMPLING,
        *REFUSED,
        *ignore(
            {
                "metadata": {"a": "b"},
                "prediction": {"type": "content", "content": "a"},
                "prompt_cache_key": "a",
                "reasoning_effort": "low",
                "safety_identifier": "a",
                "service_tier": "auto",
                "store": True,
                "stream_options.include_obfuscation": False,
                "user": "a",
                "verbosity": "low",
                "web_search_options": {},
            }
        ),
    )
)


MESSAGES_FIELDS: Final = FieldTable(
    (
        serve("messages", [{"role": "user", "content": "Hi."}]),
        serve("system", "Be brief."),
        serve("model", "policy"),
        serve("tools", [{"name": "add", "input_schema": {}}]),
        serve("max_tokens", 9),
        serve("stop_sequences", ["a"], []),
        serve("stream", True, False),
        serve("tool_choice", {"type": "none"}, {"type": "auto"}, form="`auto`, `none`"),
        FieldRule(
            name="tool_choice", form="`any`", effect="wished", example={"type": "any"}, counted="tool_choice_required"
        ),
        FieldRule(
            name="tool_choice.disable_parallel_tool_use",
            effect="wished",
            example=True,
            neutral=(False,),
            beside={"type": "auto"},
        ),
        FieldRule(
            name="tool_choice",
            form="one tool",
            effect="optional",
            example={"type": "tool", "name": "add"},
            counted="tool_choice_named",
        ),
        FieldRule(
            name="output_config.format",
            effect="optional",
            example={"type": "json_schema", "schema": {"type": "object"}},
        ),
        FieldRule(
            name="output_format", effect="optional", example={"type": "json_schema", "schema": {"type": "object"}}
        ),
        *FOREIGN_FORMATS,
        *TEMPLATE_OPTIONS,
        *SAMPLING,
        *REFUSED,
        FieldRule(name="output_config.effort", effect="ignored", example="low", counted="output_config"),
        *ignore(
            {
                "container": "a",
                "context_management": {"edits": []},
                "mcp_servers": [],
                "metadata": {"user_id": "a"},
                "service_tier": "auto",
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            }
        ),
    )
)

RESPONSES_FIELDS: Final = FieldTable(
    (
        serve("input", "Hi."),
        serve("instructions", "Be brief."),
        serve("model", "policy"),
        serve("tools", [{"type": "function", "name": "add"}]),
        serve("max_output_tokens", 9),
        serve(
            "include",
            ["message.output_text.logprobs"],
            [],
            form="`message.output_text.logprobs`, `reasoning.encrypted_content`",
        ),
        FieldRule(name="include", form="other parts", effect="ignored", example=["file_search_call.results"]),
        serve("stream", True, False),
        serve("tool_choice", "none", "auto", form="`auto`, `none`"),
        FieldRule(
            name="tool_choice", form="`required`", effect="wished", example="required", counted="tool_choice_required"
        ),
        FieldRule(
            name="tool_choice",
            form="one tool",
            effect="optional",
            example={"type": "function", "name": "add"},
            counted="tool_choice_named",
        ),
        FieldRule(
            name="tool_choice",
            form="`allowed_tools`",
            effect="optional",
            example={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
            counted="tool_choice_allowed",
        ),
        FieldRule(name="parallel_tool_calls", effect="wished", example=False, neutral=(True,)),
        FieldRule(name="text.format", form="`json_object`", effect="optional", example={"type": "json_object"}),
        FieldRule(
            name="text.format",
            form="`json_schema`",
            effect="optional",
            example={"type": "json_schema", "name": "a", "schema": {"type": "object"}},
            neutral=({"type": "text"},),
        ),
        serve("store", False, True),
        *FOREIGN_FORMATS,
        *refuse_all(FOREIGN_FORMAT, {"output_format": ({"type": "json_schema", "schema": {}},)}),
        FieldRule(name="background", effect="refused", example=True, neutral=(False,)),
        FieldRule(name="conversation", effect="refused", example="conv_1"),
        FieldRule(name="previous_response_id", form="no response of the session", effect="refused", example="resp_1"),
        FieldRule(name="prompt", effect="refused", example={"id": "a"}),
        *TEMPLATE_OPTIONS,
        *SAMPLING,
        *REFUSED,
        FieldRule(name="stream_options.include_obfuscation", effect="ignored", example=False, counted="stream_options"),
        *ignore(
            {
                "max_tool_calls": 9,
                "metadata": {"a": "b"},
                "prompt_cache_key": "a",
                "reasoning": {"effort": "low"},
                "safety_identifier": "a",
                "service_tier": "auto",
                "stream_options.include_obfuscation": False,
                "text.verbosity": "low",
                "truncation": "auto",
                "user": "a",
            }
        ),
    )
)
