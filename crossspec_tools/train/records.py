"""Records of how every drafter would have done at every token of the target's texts.

Routers are trained on them (WhiFlash, section 3.3.2); oracles, calibration and pictures are computed from them.
``crossspec collect`` writes them (``records.shards``); a shard has the texts of some prompts.

A record is made where a round could begin: after a token that the target has sampled, the first of its answer
included. Shape legend: T texts, M records (rows), N drafters in routing order (the last is the reference), H hidden
size, D draft tokens of a drafter.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from crossspec_tools.records.shards import FORMAT_VERSION, Steps, joined_steps, read_shards, shard_paths
from crossspec_tools.records.shards import write_shard as write_file
from vllm_crossspec.differences import differences
from vllm_crossspec.files import write_json
from vllm_crossspec.names import counted

INDEX_FILE = "records.json"
NAMES = ("entropy", "lengths", "known", "forecasts")
"""Tensors of a shard beside the hidden states, which may not fit the memory."""
NO_FORECAST = -1.0
"""Of a drafter that does not know before it drafts what to expect."""
NO_TOKEN = -2
"""Stands for a token past the end of a text; dead draft nodes are -1, so that nothing equals it."""


class Facts(NamedTuple):
    """What all shards of a folder have in common."""

    model: str  # the target, as named by who collected
    hidden_size: int  # H
    drafters: tuple[str, ...]  # [N] names in routing order
    depths: tuple[int, ...]  # [N] most draft tokens of a path, of each drafter


class Answer(NamedTuple):
    """One finished text."""

    category: str  # of its prompt
    num_prompt_tokens: int  # length of the prompt
    token_ids: list[int]  # what the target generated
    reason: str  # why it ended: vLLM's finish reason, or `prompt too long`


class Text(NamedTuple):
    """Where a text's records are: rows ``start`` to ``end`` (not included), one for each of its tokens but the last."""

    number: int
    category: str
    start: int
    end: int


class Shard(NamedTuple):
    """One file and the rows that it holds."""

    path: Path
    start: int
    end: int


class Records(NamedTuple):
    """All records of a folder, without the hidden states, which may not fit the memory (:func:`hidden_states`)."""

    facts: Facts  # what they are of
    texts: tuple[Text, ...]  # in row order
    shards: tuple[Shard, ...]  # in row order
    entropy: torch.Tensor  # float32 [M], nats, of the target's distribution from which it sampled the token
    # int64 [M, N] tokens that a round beginning there yields with each drafter, the target's own included
    lengths: torch.Tensor
    # int64 [M] tokens of the text after the record's. Where a draft's accepted part reaches the end of the text, the
    # length that is recorded is a lower bound.
    known: torch.Tensor
    # float32 [M, N] draft tokens that each drafter expected to be accepted, before it drafted; `NO_FORECAST` where it
    # did not say
    forecasts: torch.Tensor

    @property
    def is_complete(self) -> torch.Tensor:
        """bool [M]: whether every drafter's length is certain. Leaving the others out by their distance from the end
        of the text, and not by whether the end was reached, keeps the rest unbiased."""
        return self.known >= max(self.facts.depths)

    @property
    def categories(self) -> tuple[str, ...]:
        """In the order in which they first appear."""
        return tuple(dict.fromkeys(text.category for text in self.texts))


def acceptance_lengths(tokens: torch.Tensor, parents: torch.Tensor | None, truth: torch.Tensor) -> torch.Tensor:
    """int64 [M] 1 + the longest path from the root whose tokens are those that follow: what a round would have yielded.

    Args:
        tokens: int [M, D] draft tokens; -1 past the live ones.
        parents: [M, D] row of each node's parent (0: the root; node i is row i + 1), smaller than its own; None for
            chains.
        truth: int [M, at least the tree's depth] tokens that followed; ``NO_TOKEN`` past the end of the text.
    """
    num_rows, num_nodes = tokens.shape
    if parents is None:
        width = min(num_nodes, truth.shape[1])
        return 1 + (tokens[:, :width] == truth[:, :width]).long().cumprod(dim=1).sum(dim=1)
    # Depth of every row that is on an accepted path; -1 where it is not.
    depth = torch.full((num_rows, num_nodes + 1), -1, dtype=torch.int64)
    depth[:, 0] = 0
    truth = torch.nn.functional.pad(truth, (0, 1), value=NO_TOKEN)
    last = truth.shape[1] - 1
    for node in range(num_nodes):
        above = depth.gather(1, parents[:, node : node + 1].long())[:, 0]
        expected = truth.gather(1, above.clamp(min=0, max=last)[:, None])[:, 0]
        depth[:, node + 1] = torch.where((above >= 0) & (tokens[:, node] == expected), above + 1, -1)
    return 1 + depth.amax(dim=1)


def assemble(steps: Steps, answers: Mapping[int, Answer], facts: Facts) -> dict[str, torch.Tensor]:
    """The tensors of a shard from what the engine recorded, sorted by text and position.

    Returns ``hidden`` [M, H], ``entropy`` float32 [M], ``lengths`` int8 [M, N], ``forecasts`` float32 [M, N], ``known``
    int16 [M], ``position`` int32 [M] (index of the record's token in the text) and ``text`` int32 [M]. Raises
    RuntimeError: a token of a text has no record. ``steps``: of the shard's requests (see ``speculator.recording``).
    """
    numbers, data = joined_steps(steps)
    rows, numbers, positions = _wanted_rows(numbers, data, answers)
    data = {name: tensor[rows] for name, tensor in data.items()}
    truth, known = _following(numbers, positions, answers, max(facts.depths))
    none = torch.full((len(rows),), NO_FORECAST)
    drafted = [(data[f"tokens.{name}"], data.get(f"parents.{name}")) for name in facts.drafters]
    lengths = [acceptance_lengths(tokens, parents, truth) for tokens, parents in drafted]
    return {
        "hidden": data["hidden"],
        "entropy": data["entropy"].float(),
        "lengths": torch.stack(lengths, dim=1).to(torch.int8),
        "forecasts": torch.stack([data.get(f"forecast.{name}", none) for name in facts.drafters], dim=1),
        "known": known.clamp(max=torch.iinfo(torch.int16).max).to(torch.int16),
        "position": positions.to(torch.int32),
        "text": numbers.to(torch.int32),
    }


def _wanted_rows(
    numbers: torch.Tensor, data: Mapping[str, torch.Tensor], answers: Mapping[int, Answer]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The steps' row, the text and the position of every record that is to be kept: all tokens except each text's last.

    Preempted requests are recorded twice, from the same states. What was computed past a text's end is dropped.
    """
    expected = sum(max(len(answer.token_ids) - 1, 0) for answer in answers.values())
    if not expected:
        raise ValueError("none of these prompts was answered with more than one token: there is nothing to record")
    prompt = torch.zeros(max(answers) + 1, dtype=torch.int64)
    length = torch.zeros_like(prompt)
    for number, answer in answers.items():
        prompt[number], length[number] = answer.num_prompt_tokens, len(answer.token_ids)
    positions = data["position"] - prompt[numbers]
    keep = (data["num_sampled"] > 0) & (positions >= 0) & (positions < length[numbers] - 1)
    rows = keep.nonzero()[:, 0]
    key = numbers[rows] * (int(length.max()) + 1) + positions[rows]
    order = key.argsort(stable=True)
    rows, key = rows[order], key[order]
    is_last = torch.cat([key[1:] != key[:-1], torch.ones(min(1, len(key)), dtype=torch.bool)])
    rows = rows[is_last]
    if len(rows) != expected:
        raise RuntimeError(f"the engine recorded {len(rows)} of {expected} tokens; please report this")
    return rows, numbers[rows], positions[rows]


def _following(
    numbers: torch.Tensor, positions: torch.Tensor, answers: Mapping[int, Answer], depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [M, depth] tokens after every record's own, and int64 [M] how many there are in the text at all."""
    starts = torch.zeros(max(answers) + 1, dtype=torch.int64)
    length, flat = torch.zeros_like(starts), list[int]()
    for number, answer in answers.items():
        starts[number], length[number] = len(flat), len(answer.token_ids)
        flat += answer.token_ids + [NO_TOKEN] * depth
    first = starts[numbers] + positions + 1
    truth = torch.tensor(flat, dtype=torch.int64)[first[:, None] + torch.arange(depth)]
    return truth, length[numbers] - 1 - positions


def _facts(found: Mapping[str, Any]) -> Facts:
    return Facts(found["model"], found["hidden_size"], tuple(found["drafters"]), tuple(found["depths"]))


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor], answers: Mapping[int, Answer], facts: Facts) -> None:
    """Write a shard whole or not at all."""
    texts = [[n, a.category, max(len(a.token_ids) - 1, 0), a.reason] for n, a in sorted(answers.items())]
    write_file(path, tensors, facts._asdict(), texts)


def claim(folder: Path, settings: Mapping[str, Any], index_file: str = INDEX_FILE, option: str = "--out") -> None:
    """Make ``folder`` the place of the collection with these ``settings``, or find that it is already.

    A folder without a finished shard is free: nothing is lost there. Raises ValueError: the folder holds records that
    were made otherwise; the sentence names what differs.
    """
    index = folder / index_file
    content = {"format_version": FORMAT_VERSION, **json.loads(json.dumps(settings))}
    if not index.is_file() or not shard_paths(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(index, content, indent=1)
        return
    try:
        found = json.loads(index.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise ValueError(f"{index} is damaged ({problem}); collect these records again") from problem
    if not isinstance(found, dict):
        raise ValueError(f"{index} is no index of records; collect them again")
    if different := differences(found, content):
        raise ValueError(
            f"{option} {folder} holds records with another {', another '.join(different)}; give another --out, or the "
            "settings that these were collected with"
        )


def read_records(folder: str | Path, key: str = "--records") -> Records:
    """All finished shards of a folder, without the hidden states.

    Raises ValueError: no such folder, no records in it, a damaged shard, or shards of different drafters.
    """
    facts, found = read_shards(Path(folder).expanduser() / INDEX_FILE, key, "collect", NAMES, _facts)
    texts, shards, row = [], [], 0
    for path, listed, tensors in found:
        first = row
        for number, category, count, _ in listed:
            if count:
                texts.append(Text(number, category, row, row + count))
                row += count
        held = len(tensors["entropy"])
        if row - first != held:
            raise ValueError(f"{key}: {path} lists {counted(row - first, 'record')} and holds {held}; delete it")
        shards.append(Shard(path, first, row))
    entropy, lengths, known, forecasts = (torch.cat([shard.tensors[name] for shard in found]) for name in NAMES)
    return Records(facts, tuple(texts), tuple(shards), entropy, lengths.long(), known.long(), forecasts)


def read_all_records(folders: Sequence[str | Path], key: str = "--records") -> Records:
    """The records of several folders as those of one: texts of the same number belong to one prompt.

    Raises ValueError: as :func:`read_records`, or two of them are of different models or drafters.
    """
    parts = [read_records(folder, key) for folder in folders]
    texts, shards, row = [], [], 0
    for folder, part in zip(folders, parts, strict=True):
        if part.facts != parts[0].facts:
            raise ValueError(f"{key}: {folder} and {folders[0]} are of different models or trees; keep them apart")
        texts += [text._replace(start=text.start + row, end=text.end + row) for text in part.texts]
        shards += [shard._replace(start=shard.start + row, end=shard.end + row) for shard in part.shards]
        row += len(part.entropy)
    tensors = (torch.cat(own) for own in zip(*(part[3:] for part in parts), strict=True))
    return Records(parts[0].facts, tuple(texts), tuple(shards), *tensors)


def hidden_states(shards: Sequence[Shard]) -> Iterator[tuple[Shard, torch.Tensor]]:
    """Each shard with its hidden states, [rows, H] in the target's own precision, one in memory at a time."""
    for shard in shards:
        yield shard, load_file(shard.path)["hidden"]


def choose_drafters(records: Records, names: Sequence[str], key: str = "--drafters") -> Records:
    """The same records of some of the drafters only. Raises ValueError: an unknown name, or fewer than two."""
    known = records.facts.drafters
    for name in names:
        if name not in known:
            raise ValueError(f"{key}: {name!r} is none of the recorded drafters ({', '.join(known)})")
    columns = [i for i, name in enumerate(known) if name in names]
    if len(columns) < 2:
        raise ValueError(f"{key}: name at least two of {', '.join(known)}; a router chooses between drafters")
    drafters, depths = tuple(known[i] for i in columns), tuple(records.facts.depths[i] for i in columns)
    facts = records.facts._replace(drafters=drafters, depths=depths)
    return records._replace(facts=facts, lengths=records.lengths[:, columns], forecasts=records.forecasts[:, columns])
