"""`crossspec flashhead`: makes, describes and judges the clusters of FlashHead, a drafter's quick output layer."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from vllm_crossspec.cli.demo import demo_prompts
from vllm_crossspec.cli.options import integers, write_json
from vllm_crossspec.cli.prompts import read_prompts
from vllm_crossspec.cli.stages import facts_table, grid, stage_bars
from vllm_crossspec.cli.usage import App
from vllm_crossspec.names import counted

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    import torch

    from crossspec_tools.flashhead.build import Clustering
    from crossspec_tools.flashhead.build import Progress as Report
    from vllm_crossspec.drafting.flashhead.assets import Assets

app = App(
    name="flashhead",
    help="FlashHead: a drafter's next token from a few clusters of its output embedding, not from the whole vocabulary."
    "\n\n"
    "Clusters belong to one model's output embedding; they need no training. `build` makes them, `recall` shows how "
    "often the head finds the dense head's token, by number of probed clusters: more probes, more work.",
)

ModelArgument = Annotated[
    Path, Argument(help="Folder of the drafter: config.json and .safetensors.", show_default=False)
]
PromptsOption = Annotated[
    Path | None,
    Option(
        help="Prompts (.jsonl with `prompt` or `turns`); the model's greedy answers give the states. "
        "Default: the demo's."
    ),
]
TargetOption = Annotated[
    Path | None,
    Option(help="Of a drafter that reads a target's states (EAGLE-3, ConFu): its target, for special ids and recall."),
]

NewTokensOption = Annotated[int, Option(min=1, help="Most tokens of an answer.")]
DeviceOption = Annotated[str, Option(help="auto, cpu or cuda.")]


@app.command()
def build(
    model: ModelArgument,
    out: Annotated[Path, Option("--out", help="Folder to write the clusters to.")],
    cluster_size: Annotated[int, Option(help="Tokens of a cluster; must divide the vocabulary.")] = 16,
    iterations: Annotated[int, Option(help="Most rounds of k-means; it ends early when nothing moves.")] = 12,
    seed: Annotated[int, Option(help="Of the first centroids; the same seed gives the same clusters.")] = 0,
    probes: Annotated[
        int | None, Option(help="Clusters to probe by default. Default: as --recall finds, else a 16th of them.")
    ] = None,
    special: Annotated[
        str | None,
        Option(
            help="Comma-separated ids that are always candidates (of a drafter: the target's ids). Default: "
            "the model's own, or the --target's."
        ),
    ] = None,
    recall: Annotated[
        float | None,
        Option(help="Probe as many clusters as find this share of the dense head's tokens, 0.99 for example."),
    ] = None,
    target: TargetOption = None,
    prompts: PromptsOption = None,
    new_tokens: NewTokensOption = 32,
    device: DeviceOption = "auto",
) -> None:
    """Cluster a model's output embedding, tied or not, in the format of the published FlashHead models.

    Every cluster gets the same number of tokens. A round compares each token with each centroid: 3 TFLOP for 151,936
    tokens of width 1024, so that a large vocabulary wants a GPU.

    Example: crossspec flashhead build Qwen3-0.6B --out qwen3-0.6b-flashhead --recall 0.99
    """
    from crossspec_tools.devices import choose_device
    from crossspec_tools.flashhead import files
    from crossspec_tools.flashhead.build import check_cluster_size, cluster
    from crossspec_tools.flashhead.quality import least_probes
    from vllm_crossspec.drafting.flashhead.head import check_probes

    chosen = choose_device(device)
    files.check_out(out)
    weight = files.read_output_embedding(model)
    check_cluster_size(len(weight), cluster_size)
    num_clusters = len(weight) // cluster_size
    if probes is not None:
        check_probes(probes, num_clusters, "--probes")
    if recall is not None and (probes is not None or not 0 < recall <= 1):
        raise ValueError(f"--recall {recall}: give a share above 0 and up to 1, and no --probes beside it")
    texts = _texts(prompts or demo_prompts(), model, target) if recall is not None else []
    ids = _special(special, model, target, len(weight))
    with stage_bars() as report:
        weight = weight.to(chosen)
        found = cluster(weight, cluster_size=cluster_size, iterations=iterations, seed=seed, progress=report)
        made = _assets(found, weight, ids, probes, {"model": model.resolve().name, "seed": seed})
        if recall is not None:
            ranks = _ranks(model, target, weight, made, texts, new_tokens, report)
            facts = {**made.facts, "recall": recall, "measured_on": len(ranks)}
            made = made._replace(num_probes=least_probes(ranks, recall), facts=facts)
    files.save_assets(out, made)
    console = Console()
    console.print(_description(out, made))
    if recall is not None:
        console.print(_curve(ranks, _numbers_to_show(made, None)))


@app.command()
def info(
    assets: Annotated[Path, Argument(help="Folder with clusters.", show_default=False)],
    model: Annotated[Path | None, Option(help="See whether they are this model's.")] = None,
) -> None:
    """Say what clusters a folder holds, after a check of every value.

    Example: crossspec flashhead info qwen3-0.6b-flashhead --model Qwen3-0.6B
    """
    from crossspec_tools.flashhead.files import read_output_embedding
    from vllm_crossspec.drafting.flashhead.assets import read_assets

    shape = tuple(read_output_embedding(model, "--model").shape) if model is not None else (None, None)
    Console().print(_description(assets, read_assets(assets, vocab_size=shape[0], hidden_size=shape[1], key="ASSETS")))


@app.command()
def recall(
    model: ModelArgument,
    assets: Annotated[Path, Option("--assets", help="Folder with the model's clusters.")],
    prompts: PromptsOption = None,
    new_tokens: NewTokensOption = 32,
    probes: Annotated[
        str | None, Option(help="Comma-separated numbers of probes. Default: powers of two and the assets' own.")
    ] = None,
    target: TargetOption = None,
    json_file: Annotated[Path | None, Option("--json", help="Also write the table to this file.")] = None,
    device: DeviceOption = "auto",
) -> None:
    """How often the head finds the dense head's token on the model's own answers, by number of probed clusters.

    Example: crossspec flashhead recall Qwen3-0.6B --assets qwen3-0.6b-flashhead --probes 128,256,512
    """
    from crossspec_tools.devices import choose_device
    from crossspec_tools.flashhead.files import read_output_embedding
    from crossspec_tools.flashhead.quality import recall as at
    from vllm_crossspec.drafting.flashhead.assets import read_assets
    from vllm_crossspec.drafting.flashhead.head import check_probes

    prompts = prompts or demo_prompts()
    weight = read_output_embedding(model).to(choose_device(device))
    vocab_size, hidden_size = weight.shape
    read = read_assets(assets, vocab_size=vocab_size, hidden_size=hidden_size, key="--assets")
    numbers = _numbers_to_show(read, probes)
    for number in numbers:
        check_probes(number, len(read.members), "--probes")
    texts = _texts(prompts, model, target)
    with stage_bars() as report:
        ranks = _ranks(model, target, weight, read, texts, new_tokens, report)
    Console().print(_curve(ranks, numbers))
    rows = [{"num_probes": number, "recall": at(ranks, number)} for number in numbers]
    write_json(json_file, {"states": len(ranks), "rows": rows})


def _texts(prompts: Path, model: Path, target: Path | None) -> list[str]:
    """What to ask the model, before anything heavy starts."""
    if find_spec("transformers") is None:
        raise ValueError('recall needs transformers: run `pip install "vllm-crossspec[train]"`')
    from vllm_crossspec.kinds.checkpoint import kind_of

    kind = kind_of(model)
    if kind is not None and target is None:
        raise ValueError(f"recall: MODEL {model} drafts from a target's states; name that target with --target")
    if target is not None and kind is None:
        raise ValueError(f"--target {target}: MODEL {model} is a language model of its own; leave out --target")
    if kind is not None:
        _states_of(model).check_drafter_format(model)
    return [prompt.turns[0] for prompt in read_prompts(prompts)]


def _assets(
    found: "Clustering", weight: "torch.Tensor", special: tuple[int, ...], probes: int | None, facts: dict[str, Any]
) -> "Assets":
    """The clusters as they are stored, with how they were made."""
    from vllm_crossspec.drafting.flashhead.assets import Assets, default_probes, group
    from vllm_crossspec.drafting.flashhead.check import FINGERPRINT, fingerprint

    members = group(found.assignments, len(found.centroids))
    assert members is not None, "clusters of unequal size"
    facts = {**facts, "iterations": found.iterations, "mean_cosine": round(found.cosine, 4)}
    facts[FINGERPRINT] = fingerprint(weight)
    return Assets(found.centroids.to(weight.dtype), members, special, probes or default_probes(len(members)), facts)


def _ranks(
    model: Path,
    target: Path | None,
    weight: "torch.Tensor",
    assets: "Assets",
    texts: list[str],
    new_tokens: int,
    report: "Report",
) -> "torch.Tensor":
    import torch

    from crossspec_tools.flashhead.quality import rank_clusters, states_of
    from crossspec_tools.train.states import load_target

    answers = load_target(target or model, torch.float32, weight.device)
    layer, draft = answers[0].get_output_embeddings(), None
    if target is not None:
        layer, draft = _states_of(model).drafting(model, target, answers[0])
    return rank_clusters(weight, assets, states_of(layer, answers, texts, new_tokens, report, draft))


HEAD_STATES = {"eagle3": "crossspec_tools.train.eagle3", "confu": "crossspec_tools.train.confu"}
"""By kind of drafter, modules with ``check_drafter_format(folder)`` and ``drafting(folder, target_folder, target)``,
which returns the drafter's output layer, and what drafts along an answer."""


def _states_of(model: Path) -> Any:
    """The module of :data:`HEAD_STATES` for a drafter."""
    from vllm_crossspec.kinds.checkpoint import kind_of

    kind = kind_of(model)
    assert kind is not None
    if kind.name not in HEAD_STATES:
        raise ValueError(
            f"MODEL {model} is a {kind.name} drafter, whose states cannot be had here; leave out --recall and choose "
            "--probes"
        )
    return import_module(HEAD_STATES[kind.name])


def _special(given: str | None, model: Path, target: Path | None, vocab_size: int) -> tuple[int, ...]:
    """The ids that are always candidates, in the vocabulary of the clusters."""
    from crossspec_tools.flashhead.files import read_special_tokens, read_target_ids

    kept = read_target_ids(model)
    if kept is None:
        return _ids(given, vocab_size) if given is not None else read_special_tokens(model, vocab_size)
    known = int(kept[-1]) + 1
    ids = _ids(given, known) if given is not None else read_special_tokens(target or model, known)
    return tuple(place for place, token in enumerate(kept.tolist()) if token in ids)


def _numbers_to_show(assets: "Assets", given: str | None) -> list[int]:
    count = len(assets.members)
    if given is None:  # powers of two, and all
        return sorted({*(2**n for n in range(count.bit_length())), count, assets.num_probes})
    return integers("--probes", given, "whole numbers")


def _curve(ranks: "torch.Tensor", numbers: list[int]) -> Table:
    from crossspec_tools.flashhead.quality import recall as at

    table = grid(f"the dense head's token on {counted(len(ranks), 'state', ',')}", ("probes", "found"))
    for number in numbers:
        table.add_row(str(number), f"{100 * at(ranks, number):.1f} %")
    return table


def _description(path: Path, assets: "Assets") -> Table:
    num_clusters, size = assets.members.shape
    width = assets.centroids.shape[1]
    scored = num_clusters + assets.num_probes * size + len(assets.special_token_ids)
    facts = {
        "vocabulary": f"{assets.vocab_size:,} tokens of width {width:,}",
        "clusters": f"{num_clusters:,} of {counted(size, 'token')}",
        "probed": f"{assets.num_probes:,}, so {scored:,} rows are scored, {assets.vocab_size / scored:.1f} times fewer",
        "special tokens": ", ".join(map(str, assets.special_token_ids)) or "none",
        "made": ", ".join(f"{key} {value}" for key, value in assets.facts.items()) or "elsewhere",
    }
    return facts_table(path, facts)


def _ids(given: str, vocab_size: int) -> tuple[int, ...]:
    ids = integers("--special", given, "whole numbers") if given else []
    if any(not 0 <= token < vocab_size for token in ids):
        raise ValueError(f"--special {given}: token ids lie between 0 and {vocab_size - 1}")
    return tuple(sorted(set(ids)))
