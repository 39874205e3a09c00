"""Every layout that vLLM-Ascend has, as rows: `python -m kvpool_simulator.layouts docs` draws and tabulates them.

Public names: `ROWS`, `Row` (module `rows`), `NUMBERS`, `Number` (module `numbers`), `svg` (module `picture`), `files`
(module `page`).
"""

from kvpool_simulator.layouts.numbers import NUMBERS, Number
from kvpool_simulator.layouts.page import files
from kvpool_simulator.layouts.picture import svg
from kvpool_simulator.layouts.rows import ROWS, Row

__all__ = ["NUMBERS", "ROWS", "Number", "Row", "files", "svg"]
