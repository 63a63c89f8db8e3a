"""Hidden tests of `answer.txt`."""

import json
import os
import subprocess
import sys
import unittest

WORK = os.getcwd()

def read(name):
    with open(os.path.join(WORK, name)) as file:
        return file.read()


class TestAnswer(unittest.TestCase):
    def test_answer(self):
        self.assertEqual(read("answer.txt").strip().split("\n"), ["logs/dune/old/heath report.txt", "no space left"])

    def test_logs_are_there(self):
        self.assertEqual(read("logs/dune/old/heath report.txt").count("\n"), 3)


if __name__ == "__main__":
    unittest.main()
