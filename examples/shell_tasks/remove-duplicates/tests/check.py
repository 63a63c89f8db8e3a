"""Hidden tests of the folder `photos`."""

import json
import os
import subprocess
import sys
import unittest

WORK = os.getcwd()

def read(name):
    with open(os.path.join(WORK, name)) as file:
        return file.read()


KEPT = {
    "photos/a/one.txt": "same\n",
    "photos/b/other (copy).txt": "other\n",
    "photos/c/empty": "",
    "photos/c/empty2": "",
    "photos/c/lone.txt": "lone\n",
    "photos/same-size.txt": "emas\n",
}
REMOVED = ["photos/a/two.txt", "photos/b/one.txt", "photos/b/other.txt", "photos/c/deep/x y.txt"]


class TestPhotos(unittest.TestCase):
    def test_files(self):
        found = {}
        for folder, _, names in os.walk(os.path.join(WORK, "photos")):
            for name in names:
                path = os.path.relpath(os.path.join(folder, name), WORK)
                found[path] = read(path)
        self.assertEqual(found, KEPT)
        self.assertFalse(os.path.exists(os.path.join(WORK, "photos/c/deep")))

    def test_list(self):
        self.assertEqual(read("removed.txt").splitlines(), REMOVED)


if __name__ == "__main__":
    unittest.main()
