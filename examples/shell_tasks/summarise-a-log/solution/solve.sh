#!/bin/sh
set -e
python3 - <<'PY'
import json
import re
from collections import Counter

line = re.compile(r'(\S+) \[[^]]+\] "GET (\S+) HTTP/1.1" ([0-9]+) ([0-9]+|-)$')
addresses, paths, size, errors = Counter(), Counter(), 0, 0
for match in map(line.match, open("access.log").read().splitlines()):
    if match:
        addresses[match[1]] += 1
        paths[match[2].split("?")[0]] += 1
        size += 0 if match[4] == "-" else int(match[4])
        errors += int(match[3]) >= 400
busiest = min(each for each in addresses if addresses[each] == max(addresses.values()))
found = {"requests": sum(paths.values()), "bytes": size, "errors": errors, "paths": paths, "busiest": busiest}
json.dump(found, open("summary.json", "w"))
PY
