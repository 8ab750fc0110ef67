"""Drawings of result objects with matplotlib.

Every function takes ``ax=`` and returns the axes. Without one it makes a figure of its own (``ax.figure.savefig("x.pdf")``);
pyplot, its backend and matplotlib's settings are not touched.
"""

from flatminima.plots.fold_changes import fold_changes
from flatminima.plots.spectrum import spectrum

__all__ = ["fold_changes", "spectrum"]
