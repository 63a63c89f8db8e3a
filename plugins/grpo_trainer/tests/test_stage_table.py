"""The table of a hybrid training's stages."""

import io

from rich.console import Console

from turnwise_grpo_trainer.stage_table import stage_rows, stages_as_markdown, stages_as_table

MIB = 1 << 20


def step(number, scale):
    """Return a step's line, whose seconds and bytes grow with `scale`."""
    stages = ["sleep", "onload", "offload_optimizer", "wake_up_weights", "sync_weights", "offload_parameters"]
    signs = [-3, 2, -1, 1, 0, -1]
    line = {f"switch/{stage}_s": scale * 0.1 for stage in [*stages, "wake_up_kv_cache"]}
    line |= {f"switch/{stage}_bytes": scale * sign * MIB for stage, sign in zip(stages, signs, strict=True)}
    line |= {"switch/wake_up_kv_cache_bytes": scale * 2.0 * MIB, "sync/bytes": 5.0 * MIB}
    return {"step": number, **line, "seconds/rollout": 2.0, "seconds/update": 3.0, "seconds/step": 6.0}


def test_medians_of_all_steps_in_order():
    """Of seconds and of bytes with their sign; the sync says how much was sent."""
    rows = stage_rows([{"step": 0, "validation/reward/mean": 1.0}, step(1, 1), step(2, 10), step(3, 2)])

    assert rows == [
        ("roll out", "2.000", ""),
        ("engine sleeps", "0.200", "-6.0"),
        ("trainer's memory comes", "0.200", "+4.0"),
        ("train", "3.000", ""),
        ("optimizer leaves", "0.200", "-2.0"),
        ("engine's weights wake up", "0.200", "+2.0"),
        ("new weights", "0.200", "+0.0 (5.0 sent)"),
        ("parameters leave", "0.200", "-2.0"),
        ("engine's KV cache wakes up", "0.200", "+4.0"),
        ("all switching, 3 steps", "1.400", ""),
        ("whole step", "6.000", ""),
    ]


def test_other_modes_have_none():
    """Nothing is printed and nothing is written."""
    rows = stage_rows([{"step": 1, "seconds/step": 1.0}])

    assert ([], "") == (rows, stages_as_markdown(rows))


def test_both_forms_say_the_same():
    """On a terminal and in the report."""
    rows = stage_rows([step(1, 1)])
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(stages_as_table(rows))
    shown, written = console.export_text(), stages_as_markdown(rows)

    for row in rows:
        assert all(cell in shown for cell in row)
        assert f"| {' | '.join(row)} |" in written
