"""Options of the agent `parallel_thinking` and of the reward `parallel_r1`."""

from __future__ import annotations

from typing import Literal

from attrs import Attribute, asdict, field, frozen, validators

Scheme = Literal["accuracy", "alternating", "format", "times_parallel", "diversity"]
_at_least_one = validators.ge(1)
_temperature = validators.optional(validators.ge(0))


@frozen(kw_only=True)
class Tags:
    """
    The tags around blocks, paths and summaries; each must be one token of the model.

    Attributes:
        block: opens a block; the model writes it.
        end_block: closes it; forced.
        path: opens a path; forced.
        end_path: closes it; the model writes it, or it is forced.
        summary: opens the summary; forced.
        end_summary: closes it; the model writes it, or it is forced.
        separator: text between the end of a block and its summary; forced, and may be of any number of tokens.
    """

    block: str = field(default="<Parallel>", validator=validators.min_len(1))
    end_block: str = field(default="</Parallel>", validator=validators.min_len(1))
    path: str = field(default="<Path>", validator=validators.min_len(1))
    end_path: str = field(default="</Path>", validator=validators.min_len(1))
    summary: str = field(default="<Summary>", validator=validators.min_len(1))
    end_summary: str = field(default="</Summary>", validator=validators.min_len(1))
    separator: str = "\n"

    def __attrs_post_init__(self) -> None:
        """Refuse a tag that stands for two things."""
        names = [value for name, value in asdict(self).items() if name != "separator"]
        if len(set(names)) != len(names):
            raise ValueError(f"the tags must differ: {', '.join(names)}")


@frozen(kw_only=True)
class ParallelThinkingConfig:
    """
    How blocks are opened, and what their paths may use.

    Attributes:
        num_paths: paths of every block.
        max_blocks: blocks of an episode; the model then goes on to its answer, and a block that it opens is text.
        max_path_tokens: most tokens that a path samples; a smaller budget is shared by the paths.
        max_summary_tokens: most tokens that a summary samples; null leaves it to the budget.
        path_temperature: of paths in training; null is the run's.
        validation_path_temperature: of paths in validation; null is the run's.
        path_seeds: a seed for each path; empty derives them from the run's. For engines with seeds, and for requests
            with layouts of the engine `transformers`.
        prompt_suffix: appended to the last user message.
        tags: the tags.
        objective: `exact` samples under the layout that is trained and needs an engine that takes layouts; `expanded`
            serves every engine and trains each path in the context that the engine saw; `auto` is exact where it can.
    """

    num_paths: int = field(default=2, validator=_at_least_one)
    max_blocks: int = field(default=4, validator=validators.ge(0))
    max_path_tokens: int = field(default=256, validator=_at_least_one)
    max_summary_tokens: int | None = field(default=None, validator=validators.optional(_at_least_one))
    path_temperature: float | None = field(default=None, validator=_temperature)
    validation_path_temperature: float | None = field(default=None, validator=_temperature)
    path_seeds: tuple[int, ...] = field(default=())
    prompt_suffix: str = ""
    tags: Tags = field(factory=Tags)
    objective: Literal["auto", "exact", "expanded"] = field(
        default="auto", validator=validators.in_(("auto", "exact", "expanded"))
    )

    @path_seeds.validator
    def _check_path_seeds(self, _attribute: Attribute[tuple[int, ...]], value: tuple[int, ...]) -> None:
        if value and len(value) != self.num_paths:
            raise ValueError(f"'path_seeds' must be empty or hold one for each of {self.num_paths} paths: {value}")


@frozen(kw_only=True)
class ParallelR1Config:
    """
    What an episode is worth, in the way of Parallel-R1.

    Attributes:
        scheme: `accuracy`: 1 right, -1 wrong. `alternating`: of `period` steps the first `num_accuracy_steps` as
            accuracy, the others 1.2 for a right answer with well-formed blocks, 1 for one without a block, -1 else;
            validation is always by accuracy. `format`: 1 for at least one block and all well-formed, -1 else.
            `times_parallel`: 1 for a right answer with well-formed blocks, -1 else. `diversity`: -1 wrong; right, 1
            without well-formed blocks, else 1.2 less 0.2 times the self-BLEU of the paths.
        period: training steps of one turn of the schedule.
        num_accuracy_steps: how many of them score accuracy alone, the first ones.
        bonus: what `alternating` gives for a right answer with well-formed blocks.
        min_paths: paths that a well-formed block has at least.
        answer_prefix: what the answer stands behind.
        tail_chars: characters at the end of the response in which the answer is looked for.
        tags: the agent's tags.
    """

    scheme: Scheme = field(
        default="accuracy",
        validator=validators.in_(("accuracy", "alternating", "format", "times_parallel", "diversity")),
    )
    period: int = field(default=10, validator=_at_least_one)
    num_accuracy_steps: int = field(default=8, validator=validators.ge(0))
    bonus: float = 1.2
    min_paths: int = field(default=2, validator=_at_least_one)
    answer_prefix: str = field(default="Final Answer:", validator=validators.min_len(1))
    tail_chars: int = field(default=300, validator=_at_least_one)
    tags: Tags = field(factory=Tags)
