"""A result as one self-contained HTML page.

Templates, style and scripts are package data. The page asks for nothing outside itself, and holds the result as one block
of JSON.
"""

from flatminima.report.files import replacing
from flatminima.report.page import write_html

__all__ = ["replacing", "write_html"]
