#!/bin/sh
set -e
python3 - <<'PY'
import json

load = lambda name: [json.loads(line) for line in open(name)]
customers = {each["id"]: each for each in load("customers.jsonl")}
seen, totals, unknown = set(), {}, []
for order in load("orders.jsonl"):
    if order["id"] in seen:
        continue
    seen.add(order["id"])
    customer = customers.get(order["customer"])
    if customer is None:
        unknown.append(order)
        continue
    new = {"name": customer["name"], "country": customer.get("country"), "orders": 0, "cents": 0}
    total = totals.setdefault(customer["id"], new)
    total["orders"] += 1
    total["cents"] += order["cents"]
rows = sorted(totals.values(), key=lambda each: (-each["cents"], each["name"]))
for name, found in (("totals.jsonl", rows), ("unknown.jsonl", unknown)):
    with open(name, "w") as file:
        file.writelines(json.dumps(each) + "\n" for each in found)
PY
