"""The kinds of parts that `turnwise new` writes."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from turnwise_testing.checks.environment import GROUP as ENVIRONMENTS


@frozen(kw_only=True)
class PartKind:
    """
    A kind of part.

    Attributes:
        registry: that the parts are registered in; for environments, which have entry points, and for wrappers, which
            are hooks, their plural.
        label: the noun in texts.
        usage: lines of a config that use a part, or a command; `NAME` is its place.
        requires: another distribution of turnwise that its module imports; empty for none.
        group: of the entry points. In another group than `turnwise` they name the class and not a module with hooks.
        needs: module without which the part's tests cannot run, and the extra of turnwise that installs it.
    """

    registry: str
    label: str
    usage: str
    requires: str = ""
    group: str = "turnwise"
    needs: tuple[str, str] = ("", "")


KINDS: Mapping[str, PartKind] = {
    "adapter": PartKind(registry="adapters", label="adapter", usage="reward: my_module:PATTERN"),
    "agent": PartKind(registry="agents", label="agent", usage="agent: NAME"),
    "chat": PartKind(registry="chats", label="chat", usage="chat: NAME", requires="turnwise-chat-templates"),
    "column": PartKind(registry="columns", label="column", usage="reward: NAME", needs=("torch", "torch")),
    "command": PartKind(registry="commands", label="command", usage="turnwise NAME tasks.jsonl"),
    "diagnostic": PartKind(registry="diagnostics", label="diagnostic", usage="turnwise doctor"),
    "engine": PartKind(registry="engines", label="engine", usage="engine: NAME"),
    "environment": PartKind(
        registry="environments",
        label="environment",
        usage="agent: {name: environment, environment: NAME}",
        requires="turnwise-environments",
        group=ENVIRONMENTS,
    ),
    "group_reward": PartKind(
        registry="group_rewards",
        label="group reward",
        usage="group_reward: NAME",
        requires="turnwise-rollout-buffer",
    ),
    "interaction": PartKind(registry="interactions", label="user simulator", usage="interaction: NAME"),
    "observer": PartKind(registry="observers", label="observer", usage="observers: [NAME]"),
    "parser": PartKind(registry="tool_parsers", label="tool parser", usage="parser: NAME"),
    "postprocessor": PartKind(
        registry="postprocessors", label="postprocessor", usage="postprocessors: [NAME]", needs=("torch", "torch")
    ),
    "reasoning_parser": PartKind(
        registry="reasoning_parsers", label="reasoning parser", usage="reasoning_parser: NAME"
    ),
    "reward": PartKind(registry="rewards", label="reward", usage="reward: NAME"),
    "router": PartKind(registry="routers", label="router", usage="router: NAME"),
    "scorer": PartKind(
        registry="scorers",
        label="scorer",
        usage="train: {scorers: [NAME]}",
        requires="turnwise-grpo-trainer",
        needs=("torch", "torch"),
    ),
    "task_source": PartKind(
        registry="task_sources",
        label="task source",
        usage="data: {path: 'NAME:small?size=100'}",
        requires="turnwise-task-files",
    ),
    "tool": PartKind(registry="tools", label="tool", usage="tools: [NAME]"),
    "transport": PartKind(
        registry="weight_transports",
        label="weight transport",
        usage="weight_transport: NAME",
        needs=("ml_dtypes", "torch"),
    ),
    "workspace": PartKind(
        registry="workspaces",
        label="workspace backend",
        usage="tools: [{name: workspace, backend: NAME}]",
        requires="turnwise-workspaces",
    ),
    "wrapper": PartKind(registry="wrappers", label="wrapper", usage="NAME: {slow_s: 1.0}"),
}
"""Every kind by its name on the command line, sorted."""
