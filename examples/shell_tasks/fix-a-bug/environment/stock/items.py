"""Items and their counts."""


class OutOfStock(Exception):
    """There is not enough of an item."""


class Item:
    """An item: its name, and its price in cents."""

    def __init__(self, name, cents):
        if not name:
            raise ValueError("an item needs a name")
        self.name = name
        self.cents = cents

    def __repr__(self):
        return "Item({!r}, {})".format(self.name, self.cents)


class Stock:
    """The counts of items by name."""

    def __init__(self):
        self._items = {}
        self._counts = {}

    def add(self, item, count=1):
        """Add some of an item."""
        if count < 0:
            raise ValueError("count must not be negative")
        self._items[item.name] = item
        self._counts[item.name] = self._counts.get(item.name, 0) + count

    def take(self, name, count=1):
        """Take some of an item, and return what they cost in cents."""
        if name not in self._items:
            raise OutOfStock(name)
        self._counts[name] -= count
        if self._counts[name] < 0:
            self._counts[name] = 0
        return self._items[name].cents * count

    def count(self, name):
        """Return how many there are of an item."""
        return self._counts.get(name, 0)

    def items(self):
        """Return the items with their counts."""
        return [(self._items[name], self._counts[name]) for name in self._items]
