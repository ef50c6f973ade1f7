"""Training steps that a GPU replays. Off by default: RECORD in support/devices.py."""
from collections.abc import Callable

import torch

from support.devices import device


class Recorded:
    """A training step, called as step(parts) -> loss, that a GPU replays: forward and backward pass, clipping
    and AdamW in one launch, instead of a thousand for which the GPU waits.

    Of each shape of a batch, the first batch is run as it is, which also makes AdamW's moments; the second is
    recorded as a CUDA graph; that and later ones are copied into its tensors, and replayed. What changes from
    step to step must be in tensors, too: learning rates, and the number of labels (`take_step` in
    nmg/loop.py).

    What we read in PyTorch's code and pull requests, and have not tried: deterministic index_put_ sorts on
    the GPU, which can be recorded (not so an index of bools, which the CPU counts); so can the gradient of an
    embedding, since it is computed with cub. Clipping and fused AdamW leave all numbers on the GPU. A replay
    reads the seed that `torch_seed` has set before it, so it draws the dropout of a step that is not
    recorded."""

    def __init__(self, step: Callable[[list[dict]], torch.Tensor], optimizer: torch.optim.Optimizer):
        self.step = step
        self.groups = optimizer.param_groups
        self.rates = [torch.zeros((), device=device()) for _ in self.groups]
        for group in self.groups:
            group["capturable"] = True
        # The default stream cannot be recorded.
        self.stream = torch.cuda.Stream()
        # All graphs share their memory, as one runs at a time.
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs = {}        # shapes of a batch -> None, or (graph, tensors that it reads, its loss)

    def __call__(self, parts: list[dict]) -> torch.Tensor:
        for group, rate in zip(self.groups, self.rates, strict=True):
            rate.fill_(group["lr"])
            group["lr"] = rate
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.run(parts)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def run(self, parts: list[dict]) -> torch.Tensor:
        [tensors] = parts
        shapes = tuple((name, tensor.shape) for name, tensor in tensors.items())
        if shapes not in self.graphs:
            self.graphs[shapes] = None
            return self.step(parts)
        if self.graphs[shapes] is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                loss = self.step(parts)
            self.graphs[shapes] = graph, tensors, loss
        graph, read, loss = self.graphs[shapes]
        for name, tensor in tensors.items():
            read[name].copy_(tensor)
        graph.replay()
        return loss
