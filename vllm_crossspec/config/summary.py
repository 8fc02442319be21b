"""A speculative config in a sentence for each drafter: for logs and for ``crossspec check``."""

from vllm_crossspec.config.schema import CrossSpecConfig, DrafterConfig
from vllm_crossspec.names import counted


def summary(settings: CrossSpecConfig) -> list[str]:
    """The method, then each drafter: what it drafts, and the files that are loaded for it."""
    lines = [f"method {settings.method}, verification {settings.verification}"]
    router = settings.router
    if router is not None and settings.is_routed:
        by = f" ({router.model})" if router.model else ""
        lines[0] += f", a router by {router.policy}{by} picks one of {len(settings.drafters)} drafters"
    return lines + [f"drafter {name}: {_drafter(name, drafter)}" for name, drafter in settings.drafters.items()]


def _drafter(name: str, drafter: DrafterConfig) -> str:
    kind = drafter.traits
    if kind.supplies == "none":
        return "drafts nothing"
    source = f"with the weights of {drafter.of}" if drafter.of else f"from {drafter.model}"
    parts = {"n-grams of": drafter.ngram, "the output layer of": drafter.head, "tree sizes of": drafter.adaptive}
    loaded = [f"{what} {part.model or drafter.model}" for what, part in parts.items() if part is not None]
    words = [kind.name if kind.name != name else "", _shape(drafter), source if kind.has_model else "", *loaded]
    return ", ".join(filter(None, words))


def _shape(drafter: DrafterConfig) -> str:
    """Sizes that are not known before the checkpoint is read are left out."""
    tree, tokens = drafter.tree, drafter.num_speculative_tokens
    load, schedule = "", tree.by_batch_size
    if isinstance(schedule, dict):
        steps = (f"{most} from {requests} requests on" for requests, most in sorted(schedule.items()))
        load = f" ({', '.join(steps)})"
    elif schedule is not None:
        load = f" (as much of it as pays at each load{', in the whole batch' if tree.budget == 'batch' else ''})"
    if tree.is_chain:
        return f"a chain{' of ' + counted(tokens, 'token') if tokens else ''}{load}"
    levels = tree.depth or tokens
    sizes = [f"{size} {what}" for size, what in ((tree.num_nodes, "nodes"), (levels, "levels")) if size]
    return f"a {tree.type} tree{' of ' if sizes else ''}{' and '.join(sizes)}{load}"
