"""Hidden tests of `notes.sh`."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

WORK = os.getcwd()


class TestNotes(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()

    def run_notes(self, *words):
        command = ["/bin/sh", os.path.join(WORK, "notes.sh"), *words]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=20)
        return done.returncode, done.stdout, done.stderr

    def good(self, *words):
        code, out, err = self.run_notes(*words)
        self.assertEqual((code, err), (0, ""))
        return out

    def bad(self, *words):
        code, out, err = self.run_notes(*words)
        self.assertEqual((code, out), (2, ""))
        self.assertTrue(err.startswith("error:"), err)

    def test_add_list_done(self):
        self.assertEqual(self.good("list"), "")
        self.good("add", "buy", "milk")
        self.good("add", "call  $HOME * back")
        self.good("add", "-n")
        self.assertEqual(self.good("list"), "1 buy milk\n2 call  $HOME * back\n3 -n\n")
        self.good("done", "2")
        self.assertEqual(self.good("list"), "1 buy milk\n2 -n\n")

    def test_find(self):
        for note in ("abc", "Xa.C", "other"):
            self.good("add", note)
        self.assertEqual(self.good("find", "a.c"), "2 Xa.C\n")
        self.assertEqual(self.run_notes("find", "gone")[:2], (1, ""))
        self.assertEqual(self.good("find", "o"), "3 other\n")
        self.assertEqual(self.run_notes("find", "3")[:2], (1, ""))

    def test_errors(self):
        self.bad()
        self.bad("sing")
        self.bad("add")
        self.good("add", "one")
        for number in ("0", "2", "x", "", "-1", "1 1"):
            self.bad("done", number)
        self.bad("done")
        self.assertEqual(self.good("list"), "1 one\n")


if __name__ == "__main__":
    unittest.main()
