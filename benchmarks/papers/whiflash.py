"""WhiFlash (Kwon et al. 2026)."""

from collections.abc import Mapping

from papers.base import PaperTable

TABLES: Mapping[str, PaperTable] = {}
