"""Hidden tests of the patched files."""

import json
import os
import subprocess
import sys
import unittest

WORK = os.getcwd()

def read(name):
    with open(os.path.join(WORK, name)) as file:
        return file.read()


QUEUE = "# queue, version 3\nwash   4\ncook   9\nread   2\nwrite  12\nsleep  23\nwalk   8\nswim   15\n"


class TestPatch(unittest.TestCase):
    def test_queue(self):
        self.assertEqual(read("queue.txt"), QUEUE)

    def test_program(self):
        done = subprocess.run([sys.executable, "-I", "job.py"], cwd=WORK, capture_output=True, text=True, timeout=20)
        self.assertEqual(done.stdout, "7 jobs, 2 late\n")

    def test_the_rest_is_unchanged(self):
        text = read("job.py")
        self.assertIn("        jobs[name] = int(due)\n", text)
        self.assertIn("NOW = 5  # hours\n", text)
        self.assertEqual(len(text.splitlines()), 23)


if __name__ == "__main__":
    unittest.main()
