"""Hidden tests of `build.sh`."""

import json
import os
import subprocess
import sys
import unittest

WORK = os.getcwd()

PAGE = (
    "<html><title>{v}</title> {v}\n<p>one</p>\n<p>two & three</p>\n<p>ten {v}</p>\n<footer>{v}</footer></html>\n"
)


def build(folder):
    return subprocess.run(["/bin/sh", os.path.join(WORK, "build.sh")], cwd=folder, capture_output=True, timeout=20)


def read(name):
    with open(os.path.join(WORK, name)) as file:
        return file.read()


class TestBuild(unittest.TestCase):
    def check(self):
        page = PAGE.format(v=read("VERSION").strip())
        self.assertEqual(read("dist/page.html"), page)
        self.assertEqual(read("dist/manifest.txt"), f"{len(page)} page.html\n")

    def test_twice_and_from_elsewhere(self):
        for folder in (WORK, "/", WORK):
            self.assertEqual(build(folder).returncode, 0)
            self.check()

    def test_sources_are_unchanged(self):
        self.assertEqual(read("VERSION"), "1.4/beta\n")
        self.assertEqual(read("src/header.html"), "<html><title>@VERSION@</title> @VERSION@\n")


if __name__ == "__main__":
    unittest.main()
