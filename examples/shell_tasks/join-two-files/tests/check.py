"""Hidden tests of the joined files."""

import json
import os
import subprocess
import sys
import unittest

WORK = os.getcwd()


def load(name):
    with open(os.path.join(WORK, name)) as file:
        return [json.loads(line) for line in file if line.strip()]


class TestTotals(unittest.TestCase):
    def test_totals(self):
        expected = [
            {"name": "Ada", "country": "UK", "orders": 1, "cents": 900},
            {"name": "Bo", "country": None, "orders": 1, "cents": 700},
            {"name": "Zoe", "country": "PT", "orders": 2, "cents": 700},
        ]
        self.assertEqual(load("totals.jsonl"), expected)

    def test_unknown(self):
        self.assertEqual(load("unknown.jsonl"), [{"id": 3, "customer": "c9", "cents": 1}])


if __name__ == "__main__":
    unittest.main()
