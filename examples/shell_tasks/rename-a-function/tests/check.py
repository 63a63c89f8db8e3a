"""Hidden tests of the package `shapes`."""

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


class TestShapes(unittest.TestCase):
    def test_new_name(self):
        code = """
import warnings
warnings.simplefilter("error")
import shapes
from shapes.areas import area
say([shapes.area(("square", 3)), area(shape=("rectangle", 2, 5)), shapes.total([("square", 2), ("square", 1)])])
"""
        self.assertEqual(ask(code), [9, 10, 5])

    def test_old_name_warns(self):
        code = """
import warnings
import shapes
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    values = [shapes.calc(("square", 3)), shapes.calc(s=("square", 4))]
say([values, [each.category.__name__ for each in found]])
"""
        self.assertEqual(ask(code), [[9, 16], ["DeprecationWarning"] * 2])

    def test_exported(self):
        self.assertIn("area", ask("import shapes; say(sorted(shapes.__all__))"))

    def test_texts(self):
        self.assertEqual(read("README.txt"), "Shapes\nCall area(shape) for the area, as a calculator would.\n")
        self.assertIn("areas.area", read("shapes/total.py"))
        self.assertIn("calculator", read("shapes/total.py"))


if __name__ == "__main__":
    unittest.main()
