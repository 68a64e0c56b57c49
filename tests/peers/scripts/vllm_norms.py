"""vLLM: the kernel that norms the context keys of all draft layers at once, weights [L, H]."""

import exchange
import torch
from vllm.platforms import current_platform

current_platform.import_kernels()
torch.set_num_threads(2)


def answer(values, arrays, folder):
    keys, weights = torch.from_numpy(arrays["keys"]), torch.from_numpy(arrays["weights"])
    out = torch.empty_like(keys)
    torch.ops._C.rms_norm(out, keys, weights, values["eps"])
    return {}, {"out": out.numpy()}


exchange.serve(answer)
