"""The report of a stock."""


def report(stock):
    """Return a line for each item: name, count and value."""
    lines = []
    for item, count in sorted(stock.items(), key=lambda pair: pair[0].name):
        value = item.cents * count
        lines.append("{}: {} worth {}.{:02d}".format(item.name, count, value // 100, value % 100))
    return lines
