"""The table of memory-switch stages of a training on shared devices."""

import io

from rich.console import Console

from turnwise_grpo_trainer.report.stage_table import stage_rows, stages_as_markdown, stages_as_table

MIB = 1 << 20


def step(number, scale):
    """Return the log line of a step; seconds and bytes are proportional to `scale`."""
    stages = ["sleep", "onload", "offload_optimizer", "wake_up_weights", "sync_weights", "offload_parameters"]
    signs = [-3, 2, -1, 1, 0, -1]
    line = {f"switch/{stage}_s": scale * 0.1 for stage in [*stages, "wake_up_kv_cache"]}
    line |= {f"switch/{stage}_bytes": scale * sign * MIB for stage, sign in zip(stages, signs, strict=True)}
    line |= {"switch/wake_up_kv_cache_bytes": scale * 2.0 * MIB, "sync/bytes": 5.0 * MIB}
    return {"step": number, **line, "seconds/rollout": 2.0, "seconds/update": 3.0, "seconds/step": 6.0}


def test_medians_of_all_steps_in_order():
    """Rows have medians of seconds and signed MiB, in order; the weight update also has the sent MiB."""
    rows = stage_rows([{"step": 0, "validation/reward/mean": 1.0}, step(1, 1), step(2, 10), step(3, 2)])

    assert rows == [
        ("roll out", "2.000", ""),
        ("put engine to sleep", "0.200", "-6.0"),
        ("load trainer", "0.200", "+4.0"),
        ("train", "3.000", ""),
        ("offload optimizer", "0.200", "-2.0"),
        ("wake up engine's weights", "0.200", "+2.0"),
        ("update weights", "0.200", "+0.0 (5.0 sent)"),
        ("offload parameters", "0.200", "-2.0"),
        ("wake up engine's KV cache", "0.200", "+4.0"),
        ("all memory switches, 3 steps", "1.400", ""),
        ("whole step", "6.000", ""),
    ]


def test_other_modes_have_none():
    """Steps without a memory switch give no rows and no text."""
    rows = stage_rows([{"step": 1, "seconds/step": 1.0}])

    assert ([], "") == (rows, stages_as_markdown(rows))


def test_both_forms_say_the_same():
    """The terminal table and the Markdown table have the same cells."""
    rows = stage_rows([step(1, 1)])
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(stages_as_table(rows))
    printed, written = console.export_text(), stages_as_markdown(rows)

    for row in rows:
        assert all(cell in printed for cell in row)
        assert f"| {' | '.join(row)} |" in written
