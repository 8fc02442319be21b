"""The entry points that vLLM calls in every process."""


def register() -> None:
    """Install this project's hooks in vLLM (group ``vllm.general_plugins``); safe to call repeatedly.

    Raises:
        RuntimeError: the plugin does not support this version of vLLM.
    """
    from vllm_crossspec.hooks.install import install

    install()


def check_early() -> None:
    """Check the command line; torch calls the group ``torch.backends`` at the end of its import, early in vLLM's."""
    from vllm_crossspec.frontend.command_line import check_command_line

    check_command_line()
