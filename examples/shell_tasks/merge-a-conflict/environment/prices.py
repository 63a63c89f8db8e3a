"""Prices of a shop, in cents."""


<<<<<<< ours
def total(prices, discount=0):
    """Return the sum of prices, less a discount."""
    return round(sum(prices) * (1 - discount))
=======
def total(prices, shipping=0):
    """Return the sum of prices with the shipping."""
    return sum(prices) + shipping
>>>>>>> theirs


<<<<<<< ours
def as_text(cents):
    """Return an amount such as 1.05."""
    return "{}.{:02d}".format(cents // 100, cents % 100)


def receipt(prices, discount=0):
    """Return the lines of a receipt."""
    lines = [as_text(price) for price in prices]
    return lines + ["total " + as_text(total(prices, discount))]
=======
def format_cents(cents):
    """Return an amount such as 1.05."""
    return "{}.{:02d}".format(cents // 100, cents % 100)


def receipt(prices, shipping=0):
    """Return the lines of a receipt."""
    lines = [format_cents(price) for price in prices]
    return lines + ["total " + format_cents(total(prices, shipping))]
>>>>>>> theirs
