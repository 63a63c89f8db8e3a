"""Hidden tests of the package `stock`."""

import json
import os
import subprocess
import sys
import unittest

WORK = os.getcwd()


def ask(code):
    """Run a program in another process, with the package on its path, and return the JSON that it prints."""
    program = f"import json, sys; sys.path.insert(0, {WORK!r}); say = lambda x: print(json.dumps(x))\n{code}"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=20)
    return json.loads(done.stdout)


class TestStock(unittest.TestCase):
    def test_take_too_many(self):
        code = """
from stock import *
s = Stock(); s.add(Item("nut", 10), 3)
try:
    s.take("nut", 4); raised = False
except OutOfStock:
    raised = True
say([raised, s.count("nut"), s.take("nut", 3), s.count("nut")])
"""
        self.assertEqual(ask(code), [True, 3, 30, 0])

    def test_take_unknown(self):
        code = """
from stock import *
try:
    Stock().take("bolt"); say(False)
except OutOfStock:
    say(True)
"""
        self.assertIs(ask(code), True)

    def test_report(self):
        code = """
from stock import *
s = Stock(); s.add(Item("b", 100), 2); s.add(Item("a", 50), 4); s.add(Item("c", 999), 1)
say(report(s))
"""
        self.assertEqual(ask(code), ["c: 1 worth 9.99", "a: 4 worth 2.00", "b: 2 worth 2.00"])

    def test_load(self):
        code = """
from stock import *
s = load("# shop\\n\\nnut;3;2,50\\n  \\nbolt; 1 ; 0.07\\nnail;2;4\\n")
say([dump(s), s.take("nut"), s.take("bolt"), s.take("nail")])
"""
        self.assertEqual(ask(code), ["nut;3;2.50\nbolt;1;0.07\nnail;2;4.00\n", 250, 7, 400])


if __name__ == "__main__":
    unittest.main()
