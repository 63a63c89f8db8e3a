"""Hidden tests of the merge."""

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


def read(name):
    with open(os.path.join(WORK, name)) as file:
        return file.read()


class TestMerge(unittest.TestCase):
    def test_total(self):
        code = "from prices import *; say([total([100, 205]), total([100, 205], 0.1), total([100], 0.5, 30), total([100], shipping=7)])"
        self.assertEqual(ask(code), [305, 274, 80, 107])

    def test_receipt(self):
        code = "from prices import *; say([receipt([105], 0, 20), receipt([100], discount=0.5), format_cents(7)])"
        self.assertEqual(ask(code), [["1.05", "total 1.25"], ["1.00", "total 0.50"], "0.07"])

    def test_old_name_is_gone(self):
        self.assertIs(ask("import prices; say(hasattr(prices, 'as_text'))"), False)

    def test_changes(self):
        lines = "Prices are cents.\nTotals have a discount.\nTotals have shipping.\nas_text is format_cents now.\n"
        self.assertEqual(read("CHANGES.txt"), lines)
        for mark in ("<<<<<<<", "=======", ">>>>>>>"):
            self.assertNotIn(mark, read("prices.py"))


if __name__ == "__main__":
    unittest.main()
