"""
Compares updates with shared prefixes and without: tokens, processor seconds, peak memory.

    python benchmarks/shared_prefixes.py                      a Llama of random weights, as wide as SmolLM-135M
    python benchmarks/shared_prefixes.py --model FOLDER       another causal model
    python benchmarks/shared_prefixes.py --case prompts       groups of 8, prompts as long as answers

    python benchmarks/shared_prefixes.py --episodes FILE...   tokens alone, of episodes of a rollout or a training

Both kinds of update alternate in one process, on the same batch, and the figures are medians with the least and the
largest of `--repeat` pairs. Each ratio compares two neighbouring updates. Memory is the peak of resident memory in a
second update of a separate process, without the memory that it had before this update.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from measurement import describe_machine

from turnwise import EpisodeResult, ModelSpec, RolloutBatch, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate
from turnwise_grpo_trainer.config import DiagnosticsConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.learner.prefix_forests import collate_forest
from turnwise_grpo_trainer.objective.rows import TokenRows
from turnwise_result_files import read_results

Records = list[Trajectory]
IDS = 1000
STAGES = ("forward_backward", "optimizer")
"""All stages of these updates; plans of passes belong to the first one."""


def answer(rng: np.random.Generator, record: Trajectory, length: int) -> Trajectory:
    """Add sampled tokens to a record, and return it."""
    record.add_action(rng.integers(0, IDS, length), np.full(length, -1.0))
    return record


def prompts(rng: np.random.Generator, length: int) -> Records:
    """Return eight answers as long as their prompt."""
    prompt = rng.integers(0, IDS, length)
    return [answer(rng, Trajectory(prompt), length) for _ in range(8)]


def long_prompts(rng: np.random.Generator, length: int) -> Records:
    """Return eight answers to a prompt that is three times as long."""
    prompt = rng.integers(0, IDS, 3 * length // 2)
    return [answer(rng, Trajectory(prompt), length // 2) for _ in range(8)]


def branches(rng: np.random.Generator, length: int) -> Records:
    """Return a session of four turns that branches into two after each: fifteen nodes, eight rows."""
    lines = [Trajectory(rng.integers(0, IDS, length // 2))]
    for _ in range(3):
        lines = [answer(rng, each, length // 2).branched(each.mark()) for line in lines for each in (line, copy(line))]
    return [answer(rng, line, length // 2) for line in lines]


def copy(record: Trajectory) -> Trajectory:
    return record.branched(record.mark())


def paths(rng: np.random.Generator, length: int) -> Records:
    """Return eight records of one prompt with three parallel paths and text after them."""
    prompt = rng.integers(0, IDS, length)
    records = []
    for _ in range(8):
        record = Trajectory(prompt)
        forked = record.fork(3)
        for path in forked:
            path.add_action(rng.integers(0, IDS, length // 4), np.full(length // 4, -1.0))
        record.join(forked)
        records.append(answer(rng, record, length // 4))
    return records


def nothing(rng: np.random.Generator, length: int) -> Records:
    """Return eight rows with other prompts."""
    return [answer(rng, Trajectory(rng.integers(0, IDS, length)), length) for _ in range(8)]


CASES: dict[str, Callable[[np.random.Generator, int], Records]] = {
    each.__name__: each for each in (prompts, long_prompts, branches, paths, nothing)
}


def make_batch(case: str, length: int, groups: int) -> RolloutBatch:
    """Return a batch of groups with rewards 0 and 1."""
    rng = np.random.default_rng(0)
    return collate(
        [
            EpisodeResult(
                task=Task(messages=({"role": "user", "content": "?"},), uid=f"t{number}"),
                rollout_n=sample,
                status=Status.COMPLETED,
                trajectories=(record,),
                scores=(TrajectoryScore(value=float(sample % 2)),),
            )
            for number in range(groups)
            for sample, record in enumerate(CASES[case](rng, length))
        ],
        pad_token_id=0,
    )


def make_model(folder: Path, layers: int) -> Path:
    """Write a Llama of random weights, as wide as SmolLM-135M and with a smaller vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(options: argparse.Namespace, *, share: bool) -> Learner:
    config = TrainConfig(
        optimizer=OptimizerConfig(lr=0.0),
        diagnostics=DiagnosticsConfig(noise_scale=False, sequences=0),
        policy=PolicyConfig(
            device="cpu",
            attn_implementation=options.attention,
            max_tokens_per_micro_batch=options.tokens,
            num_threads=1,
            share_prefixes=share,
        ),
    )
    spec = ModelSpec(path=options.model)
    return Learner.load(config, spec, temperature=1.0, response_length=8192, device=torch.device("cpu"))


def measure_memory(options: argparse.Namespace) -> None:
    """Print the growth of the resident memory at the peak of an update, in MiB; Linux alone tells it."""
    learner = load(options, share=options.child == "shared")
    batch = make_batch(options.case, options.length, options.groups)
    learner.update(batch, step=1, version=0)  # which makes gradients and the state of the optimizer
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    before = read_memory("VmRSS")
    learner.update(batch, step=1, version=0)
    sys.stdout.write(json.dumps(read_memory("VmHWM") - before))


def read_memory(name: str) -> float:
    """Return a line of the status of this process, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def child_memory(options: argparse.Namespace, case: str, kind: str) -> float:
    names = ("length", "groups", "tokens", "attention", "model")
    arguments = [text for name in names for text in (f"--{name}", str(getattr(options, name)))]
    command = [sys.executable, "-W", "ignore", __file__, "--case", case, "--child", kind, *arguments]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def compare(options: argparse.Namespace, case: str) -> str:
    """Return a line of a table: separate rows against shared prefixes."""
    batch = make_batch(case, options.length, options.groups)
    learners = {share: load(options, share=share) for share in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    metrics = {share: learner.update(batch, step=1, version=0) for share, learner in learners.items()}  # warm up
    for number in range(options.repeat):
        for share in (False, True) if number % 2 else (True, False):
            found = learners[share].update(batch, step=1, version=0)
            seconds[share].append(sum(found[f"cpu/{stage}"] for stage in STAGES))
    ratios = [one / other for one, other in zip(seconds[False], seconds[True], strict=True)]
    forwarded = [metrics[share]["update/forwarded_tokens"] for share in (False, True)]
    tokens = f"{forwarded[0]:.0f} | {forwarded[1]:.0f} | {forwarded[0] / forwarded[1]:.2f}"
    cells = [case, tokens, *(f"{statistics.median(seconds[share]):.2f}" for share in (False, True)), spread(ratios)]
    if options.memory:
        cells += [f"{child_memory(options, case, kind):.0f}" for kind in ("separate", "shared")]
    return f"| {' | '.join(cells)} |"


def count_episodes(options: argparse.Namespace) -> str:
    """Return a line for each file of episodes: the tokens of its rows, and of the forests of its tasks."""
    lines = ["| episodes | rows | tokens separate | shared | quotient |", "| --- | ---: | ---: | ---: | ---: |"]
    for file in options.episodes:
        batch = collate(list(read_results(file)), pad_token_id=0)
        rows = TokenRows.from_batch(batch, batch.loss_mask)
        trained = [row for row in range(len(rows)) if rows.select([row]).targets.numel()]
        separate = sum(rows.bounds[row + 1] - rows.bounds[row] for row in trained)
        shared = collate_forest(rows, trained).input_ids.numel() if trained else 0
        quotient = f"{separate / shared:.2f}" if shared else "-"
        lines.append(f"| {file} | {len(trained)} | {separate} | {shared} | {quotient} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a causal model (default: made, of random weights)")
    parser.add_argument("--layers", type=int, default=4, help="of the made model (default: 4)")
    parser.add_argument("--case", choices=CASES, help="one case (default: all)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a prompt (default: 64)")
    parser.add_argument("--groups", type=int, default=2, help="groups of a batch (default: 2)")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens of a micro-batch (default: 2048)")
    parser.add_argument("--attention", default="sdpa", help="sdpa (default), eager or turnwise_segments")
    parser.add_argument("--repeat", type=int, default=5, help="pairs of updates (default: 5)")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out the memory")
    parser.add_argument("--episodes", nargs="+", type=Path, help="folders of runs or files; nothing else is measured")
    parser.add_argument("--child", choices=("separate", "shared"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure_memory(options)
        return
    if options.episodes:
        print(count_episodes(options))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.model = options.model or make_model(Path(folder), options.layers)
        print(describe_machine())
        print(f"{options.attention}, prompts of {options.length} tokens, {options.groups} groups of 8")
        names = ["rows", "tokens separate", "shared", "quotient", "seconds separate", "shared", "quotient"]
        names += ["MiB separate", "shared"] if options.memory else []
        print(f"| {' | '.join(names)} |\n| --- |{' ---: |' * (len(names) - 1)}")
        for case in [options.case] if options.case else CASES:
            print(compare(options, case), flush=True)


if __name__ == "__main__":
    main()
