"""The items of the audit for a module and a converted model, in the order of a report.

Sections, tables and appendices are those of arXiv 2604.06169. "The reference code" is the code that its
authors published. The items of a training recipe are in `inplace_ttt.training.audit`.
"""

from ..item import Item
from .circumstances import CIRCUMSTANCES
from .clip import CLIP
from .layers import LAYERS
from .rule import RULE
from .sequence import SEQUENCE
from .target import TARGET

METHOD: tuple[Item, ...] = (*RULE, *TARGET, *CLIP, *SEQUENCE, *LAYERS, *CIRCUMSTANCES)


def catalog() -> dict[str, Item]:
    """Returns every item by its id."""
    return {item.id: item for item in METHOD}
