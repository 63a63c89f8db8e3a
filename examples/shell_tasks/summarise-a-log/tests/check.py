"""Hidden tests of `summary.json`."""

import json
import os
import re
import subprocess
import sys
import unittest
from collections import Counter

WORK = os.getcwd()

LINE = re.compile(r'(\S+) \[[^]]+\] "GET (\S+) HTTP/1.1" ([0-9]+) ([0-9]+|-)$')


class TestSummary(unittest.TestCase):
    def test_summary(self):
        with open("/tests/access.log") as file:
            found = [match.groups() for match in map(LINE.match, file.read().splitlines()) if match]
        addresses = Counter(each[0] for each in found)
        most = max(addresses.values())
        expected = {
            "requests": len(found),
            "bytes": sum(0 if each[3] == "-" else int(each[3]) for each in found),
            "errors": sum(int(each[2]) >= 400 for each in found),
            "paths": dict(Counter(each[1].split("?")[0] for each in found)),
            "busiest": min(each for each, count in addresses.items() if count == most),
        }
        with open(os.path.join(WORK, "summary.json")) as file:
            self.assertEqual(json.load(file), expected)


if __name__ == "__main__":
    unittest.main()
