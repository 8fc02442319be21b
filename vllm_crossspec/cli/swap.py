"""`crossspec swap`: new weights for a drafter of a running server."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

SWAP_SECONDS = 600


def swap(
    url: Annotated[str, Argument(help="The server's, as http://127.0.0.1:8000.")],
    drafter: Annotated[str, Argument(help="Its name: the key in `drafters`, or the method.")],
    folder: Annotated[Path, Argument(help="Of the checkpoint, on the server's machine.")],
) -> None:
    """Give a drafter of a running server the weights of another checkpoint of its shape.

    The server must have been started with VLLM_SERVER_DEV_MODE=1, which lets whoever reaches it call its workers: keep
    it to a network of your own. Requests go on, and a checkpoint that does not fit changes nothing.

    Example: crossspec swap http://127.0.0.1:8000 eagle3 runs/eagle3/model
    """
    content = {"method": "crossspec_swap_drafter", "args": [drafter, str(folder.absolute())]}
    request = urllib.request.Request(
        f"{url.rstrip('/')}/collective_rpc", json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"URL {url!r} is none; give the server's, as http://127.0.0.1:8000")
    try:
        with urllib.request.urlopen(request, timeout=SWAP_SECONDS) as answer:
            changed = json.load(answer)["results"][0]
    except urllib.error.HTTPError as problem:
        if problem.code == 404:
            raise ValueError(f"{url} takes no such calls; start the server with VLLM_SERVER_DEV_MODE=1") from None
        raise ValueError(f"{url}: {_sentence(problem.read().decode())}") from None
    except urllib.error.URLError as problem:
        raise ValueError(f"{url} does not answer ({problem.reason})") from None
    typer.echo(f"new weights: {', '.join(changed)}")


def _sentence(answer: str) -> str:
    """What the server says went wrong, without what vLLM puts before it."""
    try:
        message = str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer
    return message.removeprefix("Call to collective_rpc method failed: ")
