"""Extraction of programs and of boxed answers from text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_torl_python.answers import extract_last_boxed
from turnwise_torl_python.blocks import extract_last_python_block, extract_python_blocks


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("no code", []),
        ("```python\nprint(1)\n```\n", ["print(1)\n"]),
        ("Run this: ```python\nprint(1)\n```", ["print(1)\n"]),
        ("```Python \nx\n``` and ```py\ny\n```", ["x\n", "y\n"]),
        ("```python\nprint(1)```", ["print(1)"]),
        ("```python\nprint(1)\n", []),
        ("```python\na\n```\n```python\nb\n", ["a\n"]),
        ("```python\nforgotten\ntext\n```python\nb\n```\n", ["b\n"]),
        ("```\nplain\n```\n```text\n1\n```", []),
        ("```python print(1) ```", []),
        ("```python\n\n```", ["\n"]),
        ("```python\nprint('```')\nprint(\"``` \")\n```", ["print('```')\nprint(\"``` \")\n"]),
        ('```python\ns = """\n```\n```python\n"""\nprint(s)\n```', ['s = """\n```\n```python\n"""\nprint(s)\n']),
        ("```python\ns = '''it's\n```\n'''\n```", ["s = '''it's\n```\n'''\n"]),
        ("```python\n# it's ``` here\nx\n```", ["# it's ``` here\nx\n"]),
        ("```python\nprint('it)\n```\n", ["print('it)\n"]),
        ('```python\ns = """never closed\n```\n', ['s = """never closed\n']),
        ("```python\ns = 'a\\'```'\n```", ["s = 'a\\'```'\n"]),
        ("````python\nx\n````\n", ["x\n"]),
    ],
)
def test_blocks(text, blocks):
    """Only complete blocks count, fences in strings and comments are ignored, and a second opening restarts a block."""
    assert extract_python_blocks(text) == blocks
    assert extract_last_python_block(text) == (blocks[-1] if blocks else None)


def test_many_fences_are_read_in_linear_time():
    """Quadratic time would exceed the time limit of the tests by far."""
    for text in ("```python\n" * 20_000, '```python\n"""' * 20_000, "```python\n'\"#`" * 20_000, "\\boxed{" * 50_000):
        assert extract_python_blocks(text) is not None
        assert extract_last_boxed(text) is None


@given(st.text(alphabet="`pythno\n '\"#\\x", max_size=80))
def test_a_block_is_a_part_of_the_text(text):
    """In any text, blocks are in order, each after an opening fence."""
    rest = text
    for block in extract_python_blocks(text):
        _, fence, rest = rest.partition("```")
        assert fence
        before, found, rest = rest.partition("\n" + block) if block else (rest, True, rest)
        assert found or block in before


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("none", None),
        ("\\boxed{1}", "1"),
        ("\\boxed{1} and \\boxed {2}.", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{1} \\boxed{2", "1"),
        ("{ \\boxed{3} } }", "3"),
        ("\\boxed{}", ""),
        ("\\fbox{1}", None),
    ],
)
def test_the_last_boxed_answer(text, answer):
    """Braces balance, escaped braces do not count, and an unclosed box is ignored."""
    assert extract_last_boxed(text) == answer
