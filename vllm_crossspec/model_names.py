"""Model names: a folder of this machine, or a repository of the hub."""

import os
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", re.ASCII)
"""ORG/NAME; vLLM reads the name of a GGUF file after a colon."""
HUB_SECONDS = 10.0
"""Longest wait for the hub's first answer."""
_CONFIGS = ("config.json", "params.json", "*.gguf")
"""A target's folder has one of these: Hugging Face's, Mistral's or llama.cpp's format."""


def folder_of(model: str, key: str, whose: str = "drafter") -> Path | None:
    """The folder that a user's model name denotes; None if it can be a hub id, ValueError if it is neither."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if HUB_ID.fullmatch(model) and not model.startswith((".", "~")):
        return None
    raise ValueError(f"{key}: there is no folder {model!r}; give the {whose}'s folder or a hub id like ORG/NAME")


def config_file(model: str, key: str) -> Path | None:
    """The config.json of a drafter's folder; None if the name can be a hub id, ValueError if it is neither."""
    folder = folder_of(model, key)
    if folder is not None and not (folder / "config.json").is_file():
        raise ValueError(f"{key}: {model} has no config.json; it is not a checkpoint folder")
    return None if folder is None else folder / "config.json"


def require_target(model: str, key: str, revision: str | None = None, ask_hub: bool = True) -> None:
    """See that a target, a folder, file or hub id, is there, as far as it can be told in a moment.

    ``ask_hub``: whether the hub may be asked about what is not in its client's cache; nothing of a model is loaded.
    """
    is_file, is_elsewhere = Path(model).expanduser().is_file(), "://" in model
    # Names of one word are from the hub's first years; the hub and the cache may still have them.
    if is_file or is_elsewhere or ("/" not in model and is_cached(model, revision)):
        return
    folder = folder_of(model, key, "target")
    if folder is None:
        problem = hub_problem(model, revision, ask_hub)
        if problem:
            raise ValueError(f"{key}: no config.json for {model!r}; {problem}")
    elif not any(any(folder.glob(name)) for name in _CONFIGS):
        raise ValueError(f"{key}: {model} has no config.json; it is not a model's folder")


def is_cached(model: str, revision: str | None = None) -> bool:
    """Whether the hub's client has a repository's config in its cache, in either format."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(model, name, revision=revision) for name in ("config.json", "params.json")]
        return any(isinstance(path, str) for path in found)
    except HFValidationError:
        return False


def hub_problem(model: str, revision: str | None = None, ask: bool = True) -> str | None:
    """Why a repository is not available, and what to do; None if it may be.

    It sends one request. The hub's own client sends six, which takes half a minute without a network. Without ``ask``
    only the cache is read.
    """
    from huggingface_hub import constants, get_token

    of_modelscope = os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")
    if of_modelscope or ":" in model or is_cached(model, revision):
        return None
    if constants.HF_HUB_OFFLINE:
        return "it is not in the local cache and HF_HUB_OFFLINE=1 forbids the hub; give a local folder"
    if not ask:
        return None
    url = f"{constants.ENDPOINT}/api/models/{model}" + (f"/revision/{quote(revision, safe='')}" if revision else "")
    token = get_token()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        urllib.request.urlopen(request, timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError as answer:
        if answer.code == 404:
            return "the hub has none; give a local folder or another id"
        if answer.code in (401, 403):
            return "the hub has none, or shows it to its members only; give a local folder, or log in (`hf auth login`)"
    except (urllib.error.URLError, TimeoutError) as problem:
        why = getattr(problem, "reason", problem)
        if isinstance(why, socket.gaierror | ConnectionError | TimeoutError):
            hub = f"{constants.ENDPOINT} does not answer ({why})"
            return f"it is not in the local cache, and {hub}; give a local folder"
    return None
