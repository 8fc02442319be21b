"""Whether SmolLM2's methods write plain vLLM's texts: python packages/smollm2/same_texts.py PROMPTS OUT [METHOD...]

Every prompt is answered greedily and seeded (temperature 0.8, top-p 0.95), side by side in one engine. Trees verify
five nodes in every round, and chains draft in every round: with widths by load hardly anything may be drafted, and
equal texts would prove nothing. Plain vLLM runs in a process that loads no plugin. Exits with 1 where a text differs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from vllm_crossspec_smollm2.models import MODELS

from vllm_crossspec.cli.models import config_of

WIDTH = 5
"""Nodes of a tree that every round verifies."""


def drafting(method: str) -> dict[str, Any]:
    """The method's speculative config, made to draft in every round."""
    config: dict[str, Any] = json.loads(config_of(MODELS, method))
    if config["method"] == "whiflash":  # its router decides
        return config
    tree = config.get("tree", {})
    is_chain = tree.get("type") == "chain"
    kept = {key: value for key, value in tree.items() if key != "by_batch_size"}
    return {**config, "tree": kept if is_chain else {**kept, "by_batch_size": {"1": WIDTH}}}


def answer(method: str, prompts: Path, out: Path, tokens: int) -> None:
    """Write the token ids of every answer, and what was drafted, to ``out``."""
    from vllm import LLM, SamplingParams

    config = {} if method == "plain" else {"speculative_config": drafting(method)}
    llm = LLM(model=str(MODELS.target()), dtype="float32", max_model_len=4096, max_num_batched_tokens=4096,
              max_num_seqs=8, enforce_eager=True, **config)  # fmt: skip
    tokenizer, asked, parameters = llm.get_tokenizer(), [], []
    for number, line in enumerate(prompts.read_text().splitlines()):
        message = [{"role": "user", "content": json.loads(line)["prompt"]}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        for sampled in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": number}):
            asked.append({"prompt_token_ids": list(ids)})
            parameters.append(SamplingParams(max_tokens=tokens, **sampled))
    texts = [list(found.outputs[0].token_ids) for found in llm.generate(asked, parameters)]
    stats = {} if method == "plain" else llm.collective_rpc("crossspec_stats")[0]
    drafted = sum(of.get("draft_tokens", 0) for of in stats.values() if isinstance(of, dict))
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps({"texts": texts, "drafted": drafted}))
    partial.rename(out)


def main(
    prompts: Annotated[Path, typer.Argument(exists=True, help="JSON lines with `prompt`.")],
    out: Annotated[Path, typer.Argument(help="Folder of the answers; a method that is there is not run again.")],
    methods: Annotated[list[str] | None, typer.Argument(help="Of `crossspec smollm2 METHOD`. Default: all.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 32,
    only: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare the texts of SmolLM2's methods with plain's."""
    if only:
        return answer(only, prompts, out / f"{only}.json", tokens)
    out.mkdir(parents=True, exist_ok=True)
    differs = False
    chosen = methods or [name for name in MODELS.methods if name != "plain"]
    for method in ["plain", *chosen]:
        file = out / f"{method}.json"
        if not file.exists():
            own = {"VLLM_PLUGINS": ""} if method == "plain" else {}
            command = [sys.executable, __file__, str(prompts), str(out), "--tokens", str(tokens), "--only", method]
            subprocess.run(command, check=True, env=os.environ | own)
        found = json.loads(file.read_text())
        plain = json.loads((out / "plain.json").read_text())["texts"]
        different = [i for i, (own, wanted) in enumerate(zip(found["texts"], plain, strict=True)) if own != wanted]
        differs = differs or bool(different)
        print(f"{method}: {len(plain)} texts, {found['drafted']} draft tokens, {len(different)} differ {different[:9]}")
    raise typer.Exit(differs)


if __name__ == "__main__":
    typer.run(main)
