#!/bin/sh
set -e
python3 - <<'PY'
import os

paths = sorted(os.path.join(folder, name) for folder, _, names in os.walk("photos") for name in names)
seen, removed = set(), []
for path in paths:
    data = open(path, "rb").read()
    if data and data in seen:
        os.remove(path)
        removed.append(path)
        if not os.listdir(os.path.dirname(path)):
            os.rmdir(os.path.dirname(path))
    seen.add(data)
open("removed.txt", "w").writelines(path + "\n" for path in removed)
PY
