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
        end_block: closes a block; forced.
        path: opens a path; forced.
        end_path: closes a path; the model writes it, or it is forced.
        summary: opens the summary; forced.
        end_summary: closes the summary; the model writes it, or it is forced.
        separator: text between a block and its summary; forced, and of any number of tokens.
    """

    block: str = field(default="<Parallel>", validator=validators.min_len(1))
    end_block: str = field(default="</Parallel>", validator=validators.min_len(1))
    path: str = field(default="<Path>", validator=validators.min_len(1))
    end_path: str = field(default="</Path>", validator=validators.min_len(1))
    summary: str = field(default="<Summary>", validator=validators.min_len(1))
    end_summary: str = field(default="</Summary>", validator=validators.min_len(1))
    separator: str = "\n"

    def __attrs_post_init__(self) -> None:
        """Check that all tags differ; `ValueError` when two are equal."""
        names = [value for name, value in asdict(self).items() if name != "separator"]
        if len(set(names)) != len(names):
            raise ValueError(f"the tags must differ: {', '.join(names)}")


@frozen(kw_only=True)
class ParallelThinkingConfig:
    """
    Number and limits of blocks and paths, and sampling of paths.

    Attributes:
        num_paths: paths of every block.
        max_blocks: most blocks of an episode; after the last one, a tag that opens a block is text.
        max_path_tokens: most tokens that a path samples; a smaller budget is divided evenly among the paths.
        max_summary_tokens: most tokens that a summary samples; null lets only the budget limit it.
        path_temperature: temperature of paths in training; null uses the run's.
        validation_path_temperature: temperature of paths in validation; null uses the run's.
        path_seeds: a seed for each path; empty derives the seeds from the run's. Engines without seeds ignore them,
            except for requests with layouts to the engine `transformers`.
        prompt_suffix: appended to the last user message.
        tags: tags of blocks, paths and summaries.
        objective: `exact` samples under the trained layout and needs an engine with layouts; `expanded` works with
            every engine and trains each path in the context that the engine saw; `auto` is `exact` if the engine has
            layouts, and `expanded` for a prompt with pictures, which no engine takes under a layout.
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
            raise ValueError(f"'path_seeds' must be empty or have one seed for each of {self.num_paths} paths: {value}")


@frozen(kw_only=True)
class ParallelR1Config:
    """
    Scheme of the reward, as in Parallel-R1, and extraction of the answer.

    Attributes:
        scheme: `accuracy`: 1 for a right answer, else -1. `alternating`: the first `num_accuracy_steps` of every
            `period` steps score accuracy; the other steps score `bonus` for a right answer with well-formed blocks, 1
            for a right answer without a block, else -1; validation scores accuracy. `format`: 1 if there is a block
            and all blocks are well-formed, else -1. `times_parallel`: 1 for a right answer with well-formed blocks,
            else -1. `diversity`: -1 for a wrong answer, 1 for a right one without well-formed blocks, else 1.2 minus
            0.2 times the self-BLEU of the paths.
        period: training steps in one cycle of `alternating`.
        num_accuracy_steps: number of steps at the start of a cycle that score accuracy.
        bonus: score of `alternating` for a right answer with well-formed blocks.
        min_paths: fewest paths of a well-formed block.
        answer_prefix: text that precedes the answer on its line.
        tail_chars: number of characters at the end of the response that may contain the answer.
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
