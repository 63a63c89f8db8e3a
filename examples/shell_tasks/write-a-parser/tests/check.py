"""Hidden tests of `settings.py`."""

import json
import os
import subprocess
import sys
import unittest

WORK = os.getcwd()


def run(text):
    return subprocess.run(
        [sys.executable, "settings.py"], input=text, capture_output=True, text=True, timeout=20, cwd=WORK
    )


class TestSettings(unittest.TestCase):
    def read(self, text):
        done = run(text)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def refuse(self, text, line):
        done = run(text)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertEqual(done.stderr.strip(), f"error: line {line}")

    def test_example(self):
        text = 'title = "Stones # and \\"sticks\\""\nplayers=2\n[board]\nwrap = false\nshift = -1 # x\ncolour = dark green\n'
        board = {"wrap": False, "shift": -1, "colour": "dark green"}
        self.assertEqual(self.read(text), {"title": 'Stones # and "sticks"', "players": 2, "board": board})

    def test_texts(self):
        text = 'a = "12"\nb = 1.5\nc = "back\\\\slash"\nd = -\ne = "" # empty\n'
        self.assertEqual(self.read(text), {"a": "12", "b": "1.5", "c": "back\\slash", "d": "-", "e": ""})

    def test_empty(self):
        self.assertEqual(self.read(""), {})
        self.assertEqual(self.read("# nothing\n\n[only]\n"), {"only": {}})

    def test_errors(self):
        self.refuse("a = 1\na = 2\n", 2)
        self.refuse("[s]\nx = 1\n\n[s]\n", 4)
        self.refuse("\nwrong\n", 2)
        self.refuse('a = "open\n', 1)

    def test_one_name_in_two_sections(self):
        self.assertEqual(self.read("x = 1\n[s]\nx = 2\n"), {"x": 1, "s": {"x": 2}})


if __name__ == "__main__":
    unittest.main()
