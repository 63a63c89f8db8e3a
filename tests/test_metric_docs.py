"""The list of metrics on the page about observing a run is that of the code."""

from pathlib import Path

from turnwise.metrics import METRICS

PAGE = Path(__file__).resolve().parents[1] / "docs/how-to/observe-a-run.md"
BEGIN, END = "<!-- metrics:begin -->\n", "<!-- metrics:end -->"


def table() -> str:
    """Return the metrics as the page should show them."""
    rows = ["| metric | kind | labels | what |", "| --- | --- | --- | --- |"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows) + "\n"


def test_every_metric_is_listed() -> None:
    """Names, kinds, labels and sentences; when this fails, put what `table()` returns between the marks."""
    text = PAGE.read_text(encoding="utf-8")

    assert text.partition(BEGIN)[2].partition(END)[0] == table()
