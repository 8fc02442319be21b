"""FlashHead (Tranheden et al. 2026) and the thesis on its draft heads."""

from collections.abc import Mapping

from papers.base import PaperTable

TABLES: Mapping[str, PaperTable] = {}
