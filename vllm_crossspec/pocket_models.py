"""The pocket models' location: a clone, or the package ``vllm-crossspec-pocket`` beside an installed wheel."""

from importlib.util import find_spec
from pathlib import Path

PACKAGE = "vllm_crossspec_pocket"
INSTALL = 'pip install "vllm-crossspec[pocket]"'


def find_pocket() -> Path:
    """The folder with target/, a folder per drafter, and prompts.jsonl: the clone's, else the package's.

    Raises:
        ValueError: neither exists.
    """
    of_clone = Path(__file__).parent / "pocket"
    if of_clone.is_dir():
        return of_clone
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the pocket models are not installed: run `{INSTALL}`, or give your own models and prompts")
    return Path(spec.submodule_search_locations[0])
