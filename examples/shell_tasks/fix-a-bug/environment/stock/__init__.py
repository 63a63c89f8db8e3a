"""Keeps the stock of a shop."""

from stock.items import Item, OutOfStock, Stock
from stock.files import dump, load
from stock.report import report

__all__ = ["Item", "OutOfStock", "Stock", "dump", "load", "report"]
