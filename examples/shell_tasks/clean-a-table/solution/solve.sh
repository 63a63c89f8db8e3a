#!/bin/sh
set -e
python3 - <<'PY'
import csv

rows = {}
with open("people.csv", newline="") as file:
    for row in csv.DictReader(file):
        row = {name: " ".join(value.split()) for name, value in row.items()}
        row["email"] = row["email"].lower()
        if "@" not in row["email"]:
            continue
        born = row["born"].replace("/", "-")
        if "." in born:
            born = "-".join(reversed(born.split(".")))
        row["born"] = "-".join(part.zfill(2) for part in born.split("-"))
        row["city"] = row["city"] or "unknown"
        rows[row["email"]] = row
with open("clean.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, ["name", "email", "born", "city"])
    writer.writeheader()
    writer.writerows(rows.values())
PY
