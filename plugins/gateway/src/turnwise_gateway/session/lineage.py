"""
The kinds of a session's records, and their parents.

Claude Code, opencode and Codex name their conversations in headers. Without headers the structure decides. All of it is
decided when the session is over, so that it does not depend on the order in which conversations started.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import define, field, frozen

from turnwise import Episode
from turnwise.types import Message
from turnwise_gateway.contents import has_parts, parts_key, text_of
from turnwise_gateway.session.options import Kind, TrainedKinds
from turnwise_gateway.session.records import OpenRecord
from turnwise_gateway.tree.messages import tools_key

NO_TOOLS: Final = tools_key(())
_ROOT_OF_CODEX: Final = "/root"
"""The name of the task's own thread; sub-agents have others."""
_MIN_SUMMARY: Final = 16
"""A shorter text may occur in a later prompt by chance, so it is no summary."""
_TAG: Final = re.compile(r"</?[a-z_]+>")
"""Agents ask for a summary in tags, and quote a part of it without them."""


@frozen(kw_only=True)
class Hints:
    """
    Facts about a conversation from the headers of its first call.

    Attributes:
        agent: name of the sub-agent or thread; empty for the main one.
        parent: name of the thread that it was started by; None when the headers name none.
        is_compaction: the call asks for a summary.
    """

    agent: str = ""
    parent: str | None = None
    is_compaction: bool = False


@frozen(eq=False)
class Described:
    """A record with its kind, label and parent."""

    record: OpenRecord
    kind: Kind
    label: str = ""
    parent: OpenRecord | None = None


def read_hints(headers: Mapping[str, str]) -> Hints:
    """Return what a call's headers say, whose names are in lower case."""
    if "x-claude-code-agent-id" in headers:
        return Hints(agent=headers["x-claude-code-agent-id"], parent=headers.get("x-claude-code-parent-agent-id", ""))
    if "x-parent-session-id" in headers:
        return Hints(agent=headers.get("x-session-id", ""), parent=headers["x-parent-session-id"])
    turn = _read_object(headers.get("x-codex-turn-metadata", ""))
    if turn.get("request_kind") == "compaction":
        return Hints(is_compaction=True)
    if turn.get("agent_name") in (None, "", _ROOT_OF_CODEX):
        return Hints()
    return Hints(agent=str(turn.get("thread_id", "")), parent="")


def describe_records(episode: Episode, records: Sequence[OpenRecord], train: TrainedKinds) -> None:
    """Tell the episode the lineage of its records, and make the messages of the main one those of the episode."""
    described = find_kinds(records)
    num_auxiliary = num_sampled = num_untrained = 0
    for each in described:
        root = _root(each, described)
        trained = getattr(train, root.kind) and each.record.num_turns > 0 and not each.record.untrained_model
        parent = each.parent.trajectory if each.parent else None
        episode.describe_record(
            each.record.trajectory, kind=each.kind, label=each.label, parent=parent, trained=trained
        )
        num_sampled += each.record.num_sampled
        num_auxiliary += each.record.num_sampled if root.kind == "auxiliary" else 0
        num_untrained += 0 if trained else each.record.num_sampled
        episode.record_metric(f"gateway/records_{each.kind}", 1)
    if num_sampled:
        episode.record_metric("gateway/auxiliary_share", num_auxiliary / num_sampled)
        episode.record_metric("gateway/untrained_share", num_untrained / num_sampled)
    last = max(
        (each.record for each in described if _root(each, described).kind == "main" and each.record.num_sampled),
        key=lambda record: record.last_delivery,
        default=None,
    )
    if last is not None:
        episode.messages[:] = last.last_node.conversation()


def find_kinds(records: Sequence[OpenRecord]) -> list[Described]:
    """Return the kind and the parent of each record."""
    if not records:
        return []
    family = _Family(tuple(record for record in records if record.parent is None), tuple(records))
    return [
        family.describe(record) if record.parent is None else family.describe_branch(record, record.parent)
        for record in records
    ]


@define(eq=False)
class _Family:
    """
    The records of a session, and what they are to each other.

    A conversation that continues after a summary has another opening, and so has one that an agent resumes with other
    notes before it. It counts with the conversation that it continues: that one may be the shorter of both, and is the
    main one all the same.
    """

    roots: tuple[OpenRecord, ...]
    records: tuple[OpenRecord, ...]
    _hints: dict[OpenRecord, Hints] = field(init=False)
    _has_tools: bool = field(init=False)
    _summaries: dict[OpenRecord, OpenRecord] = field(init=False)
    _openings: dict[OpenRecord, tuple[object, ...]] = field(init=False)
    _policy: tuple[OpenRecord, ...] = field(init=False)
    _main_opening: tuple[object, ...] = field(init=False)
    _main: OpenRecord = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._hints = {root: read_hints(root.headers) for root in self.roots}
        self._has_tools = any(root.tools != NO_TOOLS for root in self.roots)
        self._summaries = {root: found for root in self.roots if (found := self._find_summary(root)) is not None}
        self._policy = tuple(root for root in self.roots if not root.untrained_model) or self.roots
        self._openings = {root: _opening(root) for root in self.roots}
        self._openings |= self._find_resumed()
        self._openings |= {root: self._find_origin(root) for root in self._summaries}
        self._main_opening = self._find_main()
        self._main = next(root for root in self._policy if self._openings[root] == self._main_opening)

    def describe(self, root: OpenRecord) -> Described:
        """Return the kind of a record with a prompt."""
        if root.untrained_model:
            return Described(root, "auxiliary", root.untrained_model, None if root is self._main else self._main)
        hints = self._hints[root]
        # A session may have nothing but a summary or a sub-agent, which then has no parent.
        main = None if root is self._main else self._main
        if self._is_compaction(root):
            return Described(root, "compaction", hints.agent, main)
        if hints.agent:
            return Described(root, "subagent", hints.agent, self._find_agent(hints.parent, root) or main)
        if self._openings[root] == self._main_opening:
            summary = self._summaries.get(root)
            return Described(root, "main", "compaction" if summary else root.reason, summary)
        if self._has_tools and root.tools == NO_TOOLS:
            return Described(root, "auxiliary")
        return Described(root, "subagent", "", self._main)

    def describe_branch(self, record: OpenRecord, parent: OpenRecord) -> Described:
        """Return the kind of a record that branched from another."""
        is_summary = record in self._summaries.values() and _num_own_turns(record) == 1
        kind: Kind = "compaction" if is_summary or read_hints(record.headers).is_compaction else "sibling"
        return Described(record, kind, record.reason, parent)

    def _is_compaction(self, root: OpenRecord) -> bool:
        shortened = self._has_tools and root.tools == NO_TOOLS and root.reason == "tools"
        is_summary = root in self._summaries.values() and self._only_writes(root)
        return self._hints[root].is_compaction or shortened or is_summary

    def _only_writes(self, record: OpenRecord) -> bool:
        """Return whether a record has no tools, or nobody has some."""
        return record.tools == NO_TOOLS or not self._has_tools

    def _find_main(self) -> tuple[object, ...]:
        """Return the opening of the conversations with the most sampled tokens that may be the main one."""
        usable = [root for root in self._policy if not self._hints[root].agent and not self._is_compaction(root)]
        with_tools = [root for root in usable if root.tools != NO_TOOLS]
        totals: dict[tuple[object, ...], int] = {}
        for root in with_tools or usable or self._policy:
            totals[self._openings[root]] = totals.get(self._openings[root], 0) + root.num_sampled
        return max(totals, key=lambda opening: totals[opening])

    def _find_summary(self, root: OpenRecord) -> OpenRecord | None:
        """Return the record whose last turn is quoted in the prompt of this one, as the summary of a conversation."""
        texts = [text_of(message.get("content")) for message in root.prompt if message["role"] != "tool"]
        for other in self.records:
            if other.untrained_model or _first(other) is root or _opening(_first(other)) == _opening(root):
                continue
            # The result that one agent hands to another is no summary: the other agent has other instructions.
            if not self._only_writes(other) and _instructions(other) != _instructions(root):
                continue
            parts = (part.strip() for part in _TAG.split(other.last_text))
            if any(part in text for part in parts if len(part) >= _MIN_SUMMARY for text in texts):
                return other
        return None

    def _find_resumed(self) -> dict[OpenRecord, tuple[object, ...]]:
        """Return the opening of the conversation that each record continues, whose prompt has calls of its turns."""
        prompts = {root: _call_ids(root.prompt) for root in self.roots}
        if not any(prompts.values()):
            return {}
        first = sorted(self.roots, key=lambda root: len(prompts[root]))
        made = {root: _call_ids(root.last_node.conversation()) - prompts[root] for root in first}
        found = {root: [other for other in first if made[other] & prompts[root]] for root in self.roots}
        return {root: _opening(others[0]) for root, others in found.items() if others}

    def _find_origin(self, root: OpenRecord) -> tuple[object, ...]:
        """Return the opening of the conversation that a record continues after a summary, or that of the record."""
        known = [
            other
            for other in self._policy
            if other not in self._summaries and not self._hints[other].agent and not self._is_compaction(other)
        ]
        alike = [other for other in known if _instructions(other) == _instructions(root)]
        # An agent may write its instructions anew after a summary, for example with another date.
        found = max(alike or known, key=lambda other: other.num_sampled, default=root)
        return _opening(found)

    def _find_agent(self, name: str | None, child: OpenRecord) -> OpenRecord | None:
        named = (root for root in self.roots if name and self._hints[root].agent == name)
        return next((root for root in named if root is not child), None)


def _root(described: Described, others: Sequence[Described]) -> Described:
    """Return the record with a prompt that a record branched from, or the record itself."""
    while described.record.parent is not None and described.kind == "sibling":
        parent = described.record.parent
        described = next(each for each in others if each.record is parent)
    return described


def _first(record: OpenRecord) -> OpenRecord:
    """Return the record with a prompt that a record branched from, or the record itself."""
    while record.parent is not None:
        record = record.parent
    return record


def _call_ids(messages: Sequence[Message]) -> set[str]:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return {call["id"] for call in calls if call.get("id")}


def _num_own_turns(record: OpenRecord) -> int:
    return sum(segment.origin.is_turn for segment in record.trajectory.segments)


def _instructions(record: OpenRecord) -> tuple[object, ...]:
    """Return the tools of a record, and the messages before the user's first."""
    return record.tools, *_opening(record)[:-1]


def _opening(root: OpenRecord) -> tuple[object, ...]:
    """Return the messages up to the user's first: conversations that share them are about the same."""
    key: list[object] = []
    for message in root.prompt:
        content = message.get("content") or ""
        key.append((message["role"], parts_key(content) if has_parts(message) else content))
        if message["role"] == "user":
            break
    return tuple(key)


def _read_object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
