"""The device that a script runs on, its precision, and the processes of torchrun."""
import atexit
import contextlib
import datetime
import functools
import os

import torch
import torch.distributed as dist
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

FAST = False                    # set by use_fast_path
NO_AUTOCAST = {"deberta", "xmod"}   # model types whose code fails in half precision


# ---------------------------------------------------------------- device and precision

@functools.cache
def device() -> torch.device:
    """The best device of this machine: cuda, then mps, then cpu. On cuda, kernels are deterministic."""
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling new memory only helps to debug code that reads what it has not written.
        torch.utils.deterministic.fill_uninitialized_memory = False
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def use_fast_path(fast: bool) -> None:
    """What --fast switches: half precision (precision_of), TF32 for what stays in fp32 on a GPU, and plain
    attention on a CPU (attention_implementation)."""
    global FAST
    FAST = fast
    if device().type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = fast
        # Whatever --fast says.
        AttentionMaskInterface.register("sdpa", mask_of_padding)


def mask_of_padding(*args, attention_mask: torch.Tensor | None = None, **options) -> torch.Tensor | None:
    """The mask of transformers' attention "sdpa" on a GPU. Batches without padding come without a mask, so we
    never ask a mask whether it hides anything: the CPU would wait for the answer."""
    if attention_mask is not None:
        options["allow_is_bidirectional_skip"] = False
    return sdpa_mask(*args, attention_mask=attention_mask, **options)


def attention_implementation() -> str | None:
    """What computes attention, as transformers calls it; None leaves the choice to transformers. On the fast
    path a CPU takes plain matrix products, which are faster than torch's kernel on short rows
    (docs/speed.md)."""
    if FAST and device().type == "cpu":
        return "eager"
    return None


def has_bf16() -> bool:
    """Whether products are faster in bf16 than in fp32. They are not where they are emulated, nor on Intel
    CPUs with AVX512_BF16 but without AMX, as in some virtual machines (docs/speed.md)."""
    if device().type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device().type == "cpu":
        cpu = torch.cpu.get_capabilities()
        fast_avx = cpu.get("avx512_bf16", False) and "Intel" not in cpu["cpu_name"]
        return cpu.get("amx_bf16", False) or fast_avx
    return False


def precision_of(model: torch.nn.Module) -> torch.dtype:
    """The dtype of a Hugging Face model's matrix products: on the fast path bf16, or fp16 on a GPU without
    native bf16 (T4, 2080 Ti); otherwise fp32."""
    if not FAST or model.config.model_type in NO_AUTOCAST:
        return torch.float32
    if has_bf16():
        return torch.bfloat16
    return torch.float16 if device().type == "cuda" else torch.float32


def autocast(model: torch.nn.Module) -> contextlib.AbstractContextManager:
    """Mixed precision: products in precision_of(model), weights in fp32."""
    dtype = precision_of(model)
    return torch.autocast(device().type, dtype, enabled=dtype != torch.float32)


def to_device(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if device().type == "cuda":
        # From pinned memory, a copy to the GPU does not wait for the work that is queued there.
        return {name: tensor.pin_memory().to(device(), non_blocking=True) for name, tensor in tensors.items()}
    return {name: tensor.to(device()) for name, tensor in tensors.items()}


# ---------------------------------------------------------------- processes of torchrun

def rank_and_world() -> tuple[int, int]:
    """The number of this process and how many there are: 0 and 1 without torchrun."""
    if "RANK" not in os.environ:
        return 0, 1
    if not dist.is_initialized():
        backend = "gloo"
        if device().type == "cuda":
            torch.cuda.set_device(device())
            backend = "cpu:gloo,cuda:nccl"
        # A process may wait hours for the play of another.
        dist.init_process_group(backend, timeout=datetime.timedelta(days=2))
        atexit.register(dist.destroy_process_group)
    return dist.get_rank(), dist.get_world_size()


def broadcast(value: object, source: int = 0) -> object:
    """The value of process `source`, in every process."""
    values = [value]
    if rank_and_world()[1] > 1:
        dist.broadcast_object_list(values, source)
    return values[0]


def all_gather(value: object) -> list:
    """The values of all processes, in every process."""
    values = [value] * rank_and_world()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values
