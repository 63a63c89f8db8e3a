"""Hidden tests of `clean.csv`."""

import csv
import json
import os
import subprocess
import sys
import unittest

WORK = os.getcwd()

ROWS = [
    ["name", "email", "born", "city"],
    ["Ada Lovelace", "ada@example.org", "1815-12-10", "London"],
    ["Grace Hopper", "grace@example.org", "1906-12-09", "New York, NY"],
    ["Alan Turing", "alan@example.org", "1912-06-23", "unknown"],
    ['Edsger "E. W." Dijkstra', "ewd@example.org", "1930-05-11", "Rotterdam"],
]


class TestTable(unittest.TestCase):
    def test_rows(self):
        with open(os.path.join(WORK, "clean.csv"), newline="") as file:
            self.assertEqual(list(csv.reader(file)), ROWS)


if __name__ == "__main__":
    unittest.main()
