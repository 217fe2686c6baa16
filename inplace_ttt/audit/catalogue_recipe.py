"""The items of a training recipe (paper Tables 4 to 8, appendix C.1 and C.2)."""

from .catalogue import Item

RECIPE: tuple[Item, ...] = ()
