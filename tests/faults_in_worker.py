"""What a test breaks in the worker of a server; vLLM adds it by ``--worker-extension-cls``."""

import sabotage


class Faults:
    """Methods of the worker, for ``/collective_rpc``."""

    def run_out_of_memory(self, after: int) -> None:
        """See ``sabotage``."""
        sabotage.run_out_of_memory(self, after)

    def count_requests(self) -> int:
        """That the worker knows of: each has a slot."""
        return len(self.model_runner.req_states.req_id_to_index)  # type: ignore[attr-defined]
