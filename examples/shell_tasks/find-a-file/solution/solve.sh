#!/bin/sh
set -e
file=$(grep -rl '^reason:' logs)
{ echo "$file"; sed -n 's/^reason: //p' "$file"; } > answer.txt
