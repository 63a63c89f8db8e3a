"""Counts jobs."""

NOW = 5  # hours


def load(path):
    jobs = {}
    for line in open(path):
        if line.startswith("#"):
            continue
        name, due = line.split()
        jobs[name] = due
    return jobs


def late(jobs):
    """Return the names of late jobs."""
    return [name for name, due in jobs.items() if due < NOW]


if __name__ == "__main__":
    found = load("queue.txt")
    print(len(found), "jobs,", len(late(found)), "late")
