"""Training of the neural router (WhiFlash, section 3.3.2 and appendix A) on records.

An MLP reads the target's final hidden state and says by how many tokens each drafter would beat the reference in a
round that begins there: H -> H / 8 -> GELU -> dropout -> N - 1, mean squared error, AdamW at 1e-3. With it go the mean
lengths and the fit of gain by entropy, which set "auto" thresholds.

Shape legend: M records, H hidden size, m = H // 8, N drafters in routing order (the last is the reference).
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import nn

from crossspec_tools.records import simulate
from crossspec_tools.records.simulate import Outcome, Signal, Trajectories, Value
from crossspec_tools.train.recipes import RouterConfig
from crossspec_tools.train.records import Records, Shard, Text, hidden_states
from vllm_crossspec.routing.checkpoint import EntropyGain, RouterCheckpoint, RouterFacts, middle_size

Progress = Callable[[int, int, float | None], None]
"""Called with optimizer steps done, of how many, and the held-out error where it was just measured."""


POOL_ROWS = 1 << 18
"""Records whose hidden states are in memory together and are shuffled among each other."""

ENTROPY_BINS = 24
"""Bins of the fit of gain by entropy, of equally many records each."""


class Split(NamedTuple):
    """Texts to learn from and texts held out."""

    train: tuple[Text, ...]
    held_out: tuple[Text, ...]


class Report(NamedTuple):
    """How a router does on the held-out texts."""

    # [N - 1] share of the variance of the gains that it explains; below 0 it is worse than their mean
    r2: tuple[float, ...]
    lengths: dict[str, float]  # acceptance length by method
    speeds: dict[str, float]  # tokens a second by method; none where costs are not known
    num_texts: int  # held out
    num_records: int  # held out

    @property
    def has_learned(self) -> bool:
        """Whether it predicts any gain better than its mean does, and methods differ at all."""
        return max(self.r2) > 0 and len({round(length, 3) for length in self.lengths.values()}) > 1


class Carried(NamedTuple):
    """What carries over to kinds of text that a router has not seen."""

    epochs: int  # after which it is worth most there
    margins: tuple[float, ...]  # [N - 1] tokens, see `RouterFacts`


class RouterNet(nn.Module):
    """The MLP, over standardised states; :meth:`folded` gives the layers that read them as they are."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, hidden_size: int, num_gains: int, dropout: float):
        super().__init__()
        self.hidden = nn.Linear(hidden_size, middle_size(hidden_size))
        self.gain = nn.Linear(middle_size(hidden_size), num_gains)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mean", torch.zeros(hidden_size))
        self.register_buffer("scale", torch.ones(hidden_size))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Gains [rows, N - 1] for float32 states [rows, H]."""
        middle = nn.functional.gelu(self.hidden((states - self.mean) * self.scale))
        return self.gain(self.dropout(middle))

    @torch.no_grad()
    def folded(self) -> tuple[torch.Tensor, ...]:
        """The four tensors of a checkpoint: the standardisation is part of the first layer."""
        weight = self.hidden.weight * self.scale
        return weight, self.hidden.bias - weight @ self.mean, self.gain.weight.clone(), self.gain.bias.clone()


def split_texts(records: Records, share: float, seed: int) -> Split:
    """Hold out whole texts, all of a prompt or none, drawn by ``seed``; at least one where ``share`` is not 0.

    Raises ValueError: too few texts for both parts.
    """
    prompts = list(dict.fromkeys(text.number for text in records.texts))
    held = 0 if share == 0 else max(1, round(share * len(prompts)))
    if len(prompts) <= held:
        raise ValueError(f"too few texts to hold out {held}: {len(prompts)}; collect more, or lower --held-out")
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = {prompts[index] for index in order[:held]}
    return Split(*(tuple(t for t in records.texts if (t.number in chosen) == held) for held in (False, True)))


def trajectories(records: Records, texts: Sequence[Text] | None = None) -> Trajectories:
    """What rules walk over, for some of the texts or for all of them."""
    chosen = records.texts if texts is None else texts
    starts, ends = torch.tensor([[t.start, t.end] for t in chosen], dtype=torch.int64).reshape(-1, 2).T
    return Trajectories(records.lengths, records.known, starts, ends)


def rows_of(records: Records, texts: Sequence[Text]) -> torch.Tensor:
    """bool [M]: the records of these texts."""
    rows = torch.zeros(len(records.entropy), dtype=torch.bool)
    for text in texts:
        rows[text.start : text.end] = True
    return rows


def gains_of(records: Records) -> torch.Tensor:
    """float32 [M, N - 1] tokens by which each drafter beats the reference."""
    lengths = records.lengths.float()
    return lengths[:, :-1] - lengths[:, -1:]


def train_router(
    records: Records,
    config: RouterConfig,
    progress: Progress = lambda *told: None,
    value: Value | None = None,
    carried: Carried | None = None,
    correct: bool = True,
) -> tuple[RouterCheckpoint, Report]:
    """Train on the records except the held-out texts. Raises ValueError: too few texts or records.

    Args:
        value: what the report counts beside tokens a round, where it has costs.
        carried: what kinds of text that were left out have taught; None: nothing.
        correct: whether the report's router corrects its predictions, as a server's does unless it is told not to.
    """
    split = split_texts(records, config.held_out, config.seed)
    rows, weights = lessons = lessons_of(records, split.train, config.weighting)
    net = fit(records, split, lessons, config, progress, epochs=carried.epochs if carried else None)
    gains = predicted_gains(records, net)
    facts = RouterFacts(
        hidden_size=records.facts.hidden_size,
        drafters=records.facts.drafters,
        target=records.facts.model,
        mean_lengths=tuple(
            simulate.walk(trajectories(records, split.train), simulate.always(i)).acceptance_length
            for i in range(len(records.facts.drafters))
        ),
        entropy_gain=fit_entropy_gain(records.entropy[rows], gains_of(records)[rows], weights[rows]),
        margins=carried.margins if carried else None,
        train={
            **asdict(config),
            "num_texts": len(split.train),
            "num_records": int(rows.sum()),
            **({"epochs_kept": carried.epochs, "corrected": correct} if carried else {}),
        },
    )
    checkpoint = RouterCheckpoint(facts, *net.folded())
    return checkpoint, _report(records, split, gains, facts, value or Value(), correct)


def lessons_of(records: Records, texts: Sequence[Text], weighting: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What there is to learn from some texts: bool [M] records, float32 [M] weights, 1 on their average.

    Raises ValueError: too few records.
    """
    rows = rows_of(records, texts) & records.is_complete
    if int(rows.sum()) < 2:
        raise ValueError("there are no records far enough from their text's end to learn from; collect longer answers")
    if weighting == "uniform":
        return rows, torch.ones(len(rows))
    weights = simulate.visits(trajectories(records, texts)).float()
    return rows, weights / weights[rows].mean()


@torch.random.fork_rng(devices=[])
def fit(
    records: Records,
    split: Split,
    lessons: tuple[torch.Tensor, torch.Tensor],
    config: RouterConfig,
    progress: Progress = lambda *told: None,
    *,
    epochs: int | None = None,
    on_epoch: Callable[[RouterNet], None] = lambda net: None,
) -> RouterNet:
    """A network that has learned the gains from ``lessons``; ``config.patience`` goes by ``split``'s held-out texts.

    ``epochs``: end after so many, on the schedule of ``config.epochs``; None: the end, or what ``patience`` says.
    ``on_epoch`` is called with the network after every epoch.
    """
    torch.manual_seed(config.seed)
    rows, weights = lessons
    targets = gains_of(records)
    net = RouterNet(records.facts.hidden_size, targets.shape[1], config.dropout)
    _standardise(net, records, rows, targets)
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    per_epoch = sum(1 for _ in _batches(records, rows, config, epoch=0, with_states=False))
    total, done = per_epoch * config.epochs, 0
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    held = rows_of(records, split.held_out) & records.is_complete
    best, best_error, waited = None, float("inf"), 0
    for epoch in range(epochs or config.epochs):
        net.train()
        for chosen, states in _batches(records, rows, config, epoch):
            error = (net(states) - targets[chosen]).square().mean(dim=1)
            loss = (error * weights[chosen]).sum() / weights[chosen].sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            done += 1
            progress(done, total, None)
        on_epoch(net.eval())
        if not config.patience or epochs or not held.any():
            continue
        error_now = float((predicted_gains(records, net.eval(), held) - targets[held]).square().mean())
        progress(done, total, error_now)
        waited = 0 if error_now < best_error else waited + 1
        if not waited:
            best, best_error = copy.deepcopy(net.state_dict()), error_now
        if waited >= config.patience:
            break
    if best is not None:
        net.load_state_dict(best)
    return net.eval()


def _standardise(net: RouterNet, records: Records, rows: torch.Tensor, targets: torch.Tensor) -> None:
    """Mean and scale of the states over the training records; the output starts at the mean gain."""
    size = records.facts.hidden_size
    total, squares, count = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64), 0
    for shard, states in hidden_states(records.shards):
        chosen = states[rows[shard.start : shard.end]].double()
        total, squares, count = total + chosen.sum(0), squares + chosen.square().sum(0), count + len(chosen)
    mean = total / count
    variance = (squares / count - mean.square()).clamp(min=1e-8)
    with torch.no_grad():
        net.mean.copy_(mean)
        net.scale.copy_(variance.rsqrt())
        net.gain.bias.copy_(targets[rows].mean(dim=0))


def _batches(
    records: Records, rows: torch.Tensor, config: RouterConfig, epoch: int, with_states: bool = True
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Row numbers int64 [n] and float32 states [n, H] of every batch of an epoch, in the order of its seed.

    Shards are drawn in any order and pooled up to ``POOL_ROWS`` records, which are shuffled among each other.
    """
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + epoch)
    order = [records.shards[i] for i in torch.randperm(len(records.shards), generator=generator).tolist()]
    pool: list[Shard] = []
    for index, shard in enumerate(order):
        pool.append(shard)
        size = sum(s.end - s.start for s in pool)
        if size < POOL_ROWS and index + 1 < len(order):
            continue
        numbers = torch.cat([torch.arange(s.start, s.end) for s in pool])
        wanted = rows[numbers].nonzero()[:, 0]
        wanted = wanted[torch.randperm(len(wanted), generator=generator)]
        states = torch.cat([states for _, states in hidden_states(pool)]) if with_states else numbers
        pool = []
        for start in range(0, len(wanted), config.batch_tokens):
            chosen = wanted[start : start + config.batch_tokens]
            yield numbers[chosen], states[chosen].float()


@torch.no_grad()
def predicted_gains(
    records: Records, net: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [M, N - 1], or [n, N - 1] of the n records in ``rows`` (bool [M]), by a function of states [rows, H]."""
    parts = []
    for shard, states in hidden_states(records.shards):
        wanted = states if rows is None else states[rows[shard.start : shard.end]]
        parts += [net(part.float()) for part in wanted.split(1 << 16)]
    return torch.cat(parts)


def checkpoint_gains(records: Records, checkpoint: RouterCheckpoint) -> torch.Tensor:
    """float32 [M, N - 1] of all records, by a trained router."""
    _, *tensors = checkpoint
    weight, bias, gain_weight, gain_bias = (tensor.float() for tensor in tensors)

    def net(states: torch.Tensor) -> torch.Tensor:
        middle = nn.functional.gelu(nn.functional.linear(states, weight, bias))
        return nn.functional.linear(middle, gain_weight, gain_bias)

    return predicted_gains(records, net)


def fit_entropy_gain(entropy: torch.Tensor, gains: torch.Tensor, weights: torch.Tensor) -> EntropyGain:
    """Mean gain [M, N - 1] by entropy [M], made non-decreasing: the more uncertain the target, the more it is worth.

    Bins of equally many records, then the pool-adjacent-violators algorithm.
    """
    shares = torch.linspace(0, 1, ENTROPY_BINS + 1, dtype=torch.float64)[1:-1]
    edges = torch.cat([torch.zeros(1, dtype=torch.float64), torch.quantile(entropy.double(), shares)]).unique()
    bins = torch.bucketize(entropy.double(), edges, right=True) - 1
    mass = torch.zeros(len(edges), dtype=torch.float64).index_add_(0, bins, weights.double())
    filled = mass > 0
    rows = []
    for column in gains.double().T:
        sums = torch.zeros(len(edges), dtype=torch.float64).index_add_(0, bins, weights.double() * column)
        rows.append(tuple(rising((sums[filled] / mass[filled]).tolist(), mass[filled].tolist())))
    kept = edges[filled].tolist()
    return EntropyGain((0.0, *kept[1:]), tuple(rows))


def rising(values: Sequence[float], masses: Sequence[float]) -> list[float]:
    """The non-decreasing values that are nearest in mean square (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for value, mass in zip(values, masses, strict=True):
        blocks.append((value, mass, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (low, low_mass, low_count), (high, high_mass, high_count) = blocks[-2:]
            mean = (low * low_mass + high * high_mass) / (low_mass + high_mass)
            blocks[-2:] = [(mean, low_mass + high_mass, low_count + high_count)]
    return [value for value, _, count in blocks for _ in range(count)]


def explained(gains: torch.Tensor, targets: torch.Tensor) -> tuple[float, ...]:
    """[N - 1] share of the variance of ``targets`` [M, N - 1] that ``gains`` explain; 1 at most."""
    spread = (targets - targets.mean(dim=0)).square().sum(dim=0).clamp(min=1e-12)
    return tuple((1 - (gains - targets).square().sum(dim=0) / spread).tolist())


def _report(
    records: Records, split: Split, gains: torch.Tensor, facts: RouterFacts, value: Value, correct: bool
) -> Report:
    """The held-out texts, or all where none is held out."""
    texts = split.held_out or split.train
    rows = rows_of(records, texts) & records.is_complete
    paths, others = trajectories(records, texts), gains.shape[1]
    outcomes: dict[str, Outcome] = {
        name: simulate.walk(paths, simulate.always(index)) for index, name in enumerate(records.facts.drafters)
    }
    entropy, neural = (value.auto_thresholds(policy, facts, others + 1) for policy in ("entropy", "neural"))
    predicted = Signal("neural", gains)
    outcomes["entropy, auto"] = simulate.walk(paths, Signal("entropy", records.entropy).rule(paths, entropy))
    outcomes["neural, auto, as predicted"] = simulate.walk(paths, predicted.rule(paths, neural))
    if correct:
        corrected = predicted._replace(usual=torch.tensor(facts.mean_lengths))
        outcomes["neural, auto"] = simulate.walk(paths, corrected.rule(paths, neural))
    one_each = [[i] for i in range(len(texts))]
    outcomes["oracle-prompt"] = simulate.walk(paths, simulate.oracle_by_group(paths, one_each, value))
    outcomes["oracle-token"] = simulate.walk(paths, simulate.oracle_token(paths, value))
    lengths = {name: outcome.acceptance_length for name, outcome in outcomes.items()}
    speeds = {name: value(outcome) for name, outcome in outcomes.items()} if value.costs is not None else {}
    r2 = explained(gains[rows], gains_of(records)[rows])
    return Report(r2, lengths, speeds, len(texts), int(rows.sum()))
