#!/bin/sh
set -e
sed -i '/^name /d; s/^write  11$/write  12/' queue.txt
sed -i 's/jobs\[name\] = due/jobs[name] = int(due)/' job.py
