"""Reads and writes stocks as lines: NAME;COUNT;PRICE."""

from stock.items import Item, Stock


def _cents(text):
    whole, _, rest = text.partition(".")
    return int(whole) * 100 + int((rest + "00")[:2])


def load(text):
    """Return the stock in a text; lines that start with # are comments."""
    stock = Stock()
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, count, price = line.split(";")
        stock.add(Item(name.strip(), _cents(price.strip().split(",")[0])), int(count))
    return stock


def dump(stock):
    """Return the text of a stock."""
    lines = []
    for item, count in stock.items():
        lines.append("{};{};{}.{:02d}".format(item.name, count, item.cents // 100, item.cents % 100))
    return "\n".join(lines) + "\n"
