"""The entry point that vLLM calls in every process (group ``vllm.general_plugins``)."""


def register() -> None:
    """Hook the proposers of this project into vLLM; safe to call any number of times in a process.

    Raises:
        RuntimeError: this vLLM is not the one that the plugin was written for; the sentence says which is.
    """
    from vllm_crossspec.engine.hooks import install

    install()
