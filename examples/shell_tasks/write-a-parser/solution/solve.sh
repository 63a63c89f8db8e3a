#!/bin/sh
set -e
cat > settings.py <<'END'
import json
import re
import sys

TEXT = re.compile(r'"((?:[^"\\]|\\["\\])*)"\s*(#.*)?$')


def fail(number):
    print(f"error: line {number}", file=sys.stderr)
    sys.exit(2)


def value_of(text, number):
    if text.startswith('"'):
        found = TEXT.match(text)
        if found is None:
            fail(number)
        return re.sub(r"\\(.)", r"\1", found[1])
    text = text.split("#", 1)[0].strip()
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else text


def main():
    outer = place = {}
    for number, line in enumerate(sys.stdin.read().splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        section = re.fullmatch(r"\[([^\]]+)\]\s*(#.*)?", line)
        if section:
            name, place = section[1].strip(), {}
            if name in outer:
                fail(number)
            outer[name] = place
            continue
        name, equals, rest = line.partition("=")
        name = name.strip()
        if not equals or not name or "#" in name or name in place:
            fail(number)
        place[name] = value_of(rest.strip(), number)
    print(json.dumps(outer))


main()
END
