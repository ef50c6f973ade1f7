"""Policies, which say for each token how much it should be masked: the linear one, how its logits are
sharpened before tokens are drawn, and `encode` and `policy_forward`, which run it over all blocks of a
sub-task. Last come the files of policies, policy.json and policy.safetensors, and the paper's network.
"""
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch.nn.utils.rnn import pad_sequence

from nmg.loop import check_finite, length_batches
from nmg.plays import Episode
from support import runs
from support.data import Batch, model_inputs
from support.devices import device
from support.models import LMReader
from support.rng import torch_seed
from support.runs import UserError, atomic_write

# The defaults of --sharpness and --clip.
SHARPNESS = 5.0
CLIP = 1.0


class Policy(torch.nn.Module):
    """What all policies have in common. A class of your own defines `token_logits`, takes hidden_size alone,
    and is named in `load_policy`.

    hidden_size: H of the LM that it reads"""
    # The arguments of `sharpened`, by which tokens are drawn; train_nmg.py sets them.
    sharpness: float | None = None
    clip: float | None = None

    def __init__(self, hidden_size: int):
        super().__init__()
        self.hidden_size = hidden_size

    def token_logits(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(B, L) the logit of masking each token, from the hidden states (B, L, H) of the LM's last layer and
        attention_mask (B, L) bool. What it returns for tokens that must not be masked is not read."""
        raise NotImplementedError

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor,
                maskable: torch.Tensor) -> torch.Tensor:
        """(B, L) `token_logits`, but -inf where not maskable (B, L) bool. Raises UserError if the logit of a
        maskable token is not finite."""
        logits = self.token_logits(hidden, attention_mask)
        check_finite(logits[maskable], "the logits of the policy")
        return logits.masked_fill(~maskable, -torch.inf)

    @torch.no_grad()
    def logits(self, batch: Batch, lm: Callable[[Batch], torch.Tensor]) -> np.ndarray:
        """For maskers (self-play uses `policy_forward`): (B, L), not sharpened; -inf where nothing may be
        masked."""
        hidden = lm(batch)                                                                      # (B, L, H)
        if hidden.shape[-1] != self.hidden_size:
            raise UserError(f"the policy reads hidden states of size {self.hidden_size}, this LM has "
                            f"{hidden.shape[-1]}; use an LM of that size, or train a policy for this one")
        masks = [torch.tensor(mask).to(hidden.device) for mask in (batch.attention_mask, batch.maskable)]
        self.to(hidden.device)
        return self(hidden, *masks).cpu().numpy()

    def save(self, folder: Path) -> None:
        """folder/policy.json and folder/policy.safetensors."""
        weights = {name: weight.contiguous().cpu() for name, weight in self.state_dict().items()}
        settings = {"class": type(self).__name__, "hidden_size": self.hidden_size,
                    "sharpness": self.sharpness, "clip": self.clip}
        with atomic_write(folder / "policy.json") as partial:
            partial.write_text(json.dumps(settings, indent=1))
        with atomic_write(folder / "policy.safetensors") as partial:
            # Not safetensors' save_file, which makes a file that only its owner can read.
            partial.write_bytes(save(weights))


class LinearPolicy(Policy):
    """The logit of masking a token is w · h, with h its hidden state under the LM: the LM is the network, and
    the policy its head. At first w = 0, so that tokens are drawn uniformly."""

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size)
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))

    def token_logits(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """As Policy says."""
        return hidden @ self.weight


def random_policy(hidden_size: int, seed: int, name: str) -> LinearPolicy:
    """A linear policy that has learned nothing: its weights are normally distributed, by a random stream of
    this name."""
    policy = LinearPolicy(hidden_size)
    torch_seed(seed, name)
    torch.nn.init.normal_(policy.weight)
    return policy


def standardized(logits: np.ndarray) -> np.ndarray:
    """Logits (B, L) with mean 0 and standard deviation 1 in each block; -inf stays -inf."""
    finite = np.ma.masked_invalid(logits)
    centered = finite - finite.mean(1, keepdims=True)
    # Equal logits, as those of w = 0 or of a single token, become 0.
    return (centered / np.maximum(centered.std(1, keepdims=True), 1e-6)).filled(-np.inf)


def sharpened(logits: np.ndarray, sharpness: float | None, clip: float | None = None) -> np.ndarray:
    """The logits (B, L) by which tokens are drawn: standardized, clipped at `clip` standard deviations above
    the mean, and multiplied by sharpness; -inf stays -inf. Without a clip they are not clipped, and without a
    sharpness (the paper's form) they are as they were.

    What a policy has learned is a direction: which tokens are better than others. How far its logits spread
    depends on how long it has learned, so they are standardized. Which of the good tokens is the best is
    mostly noise, so those above the clip are drawn alike: else the kind of words that noise put first may get
    nearly all masks (docs/comparisons.md)."""
    if sharpness is None:
        return logits
    scaled = standardized(logits)
    if clip is not None:
        scaled = np.minimum(scaled, clip)
    # -inf is left out, as 0 times -inf is NaN.
    scaled[np.isfinite(scaled)] *= sharpness
    return scaled


# ---------------------------------------------------------------- states

# The hidden states of a block, (L, H) float16, and which of its tokens may be masked, (L,) bool, both without
# padding. (A plain tuple, as checkpoints are loaded with weights_only=True.)
State = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def encode(lm: torch.nn.Module, blocks: Batch | Episode) -> list[State]:
    """The states of M blocks (M, L) under the current LM."""
    length = blocks.attention_mask.sum(1)
    states = [None] * len(length)
    reader = LMReader(lm)
    for indices in length_batches(length):
        L = length[indices].max()
        inputs = model_inputs(blocks.input_ids[indices, :L], blocks.attention_mask[indices, :L])
        hidden = reader.run(lm.base_model, inputs).last_hidden_state.half().cpu()           # (B, L, H)
        for row, i in enumerate(indices):
            # Cloned, as a view would keep the whole batch in memory.
            state = hidden[row, :length[i]].clone()
            states[i] = state, torch.tensor(blocks.maskable[i, :length[i]])
    return states


def padded(states: list[State]) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """All blocks in batches of similar length, to save padding: the indices of B of them, and what a policy
    reads: their hidden states (B, L, H), attention_mask and maskable (B, L)."""
    length = np.array([len(hidden) for hidden, _ in states])
    for indices in length_batches(length):
        some = [states[i] for i in indices]
        hidden = pad_sequence([hidden for hidden, _ in some], batch_first=True).to(device())
        maskable = pad_sequence([maskable for _, maskable in some], batch_first=True).to(device())
        attention_mask = torch.arange(hidden.shape[1]) < torch.from_numpy(length[indices])[:, None]
        yield indices, hidden.float(), attention_mask.to(device()), maskable


def policy_forward(policy: Policy, states: list[State]) -> torch.Tensor:
    """Logits (M, L) of M blocks, -inf at tokens that must not be masked."""
    longest = max(len(hidden) for hidden, _ in states)
    logits = torch.full((len(states), longest), -torch.inf, device=device())
    for indices, hidden, attention_mask, maskable in padded(states):
        logits[indices, :hidden.shape[1]] = policy(hidden, attention_mask, maskable)
    return logits


# ---------------------------------------------------------------- files

def load_policy(folder: str | Path) -> Policy:
    """The policy of a folder. Raises UserError if there is none, or if the run that makes it, or makes it
    longer, is not finished."""
    if runs.is_unfinished(folder):
        raise UserError(f"{folder}: the run that learns this policy is not finished; start its command again")
    try:
        settings = json.loads((Path(folder) / "policy.json").read_text())
        weights = load_file(Path(folder) / "policy.safetensors")
        # Older policies do not say their class: all were networks.
        classes = {"LinearPolicy": LinearPolicy, "PaperPolicy": PaperPolicy}
        policy = classes[settings.get("class", "PaperPolicy")](settings["hidden_size"])
        policy.load_state_dict(weights)
        policy.sharpness, policy.clip = settings.get("sharpness"), settings.get("clip")
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as e:
        raise UserError(f"{folder}: no policy of train_nmg.py in this folder: policy.json or "
                        "policy.safetensors is missing, cut short, or written by other code") from e
    if isinstance(policy, LinearPolicy) and not policy.weight.any():
        print(f"WARNING: {folder}: this policy has learned nothing, as its players always scored alike; "
              "tokens drawn from it are random, and those of its highest logits the first of each block")
    return policy


# ---------------------------------------------------------------- the paper's network

class PaperPolicy(Policy):
    """The paper's network: BERT's self-attention sublayer (attention, residual, LayerNorm; no dropout), then
    Linear(H, 128) - gelu - Linear(128, 1) for each token, the logit of masking it."""

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size)
        # BERT-base has 12 heads of size 64.
        heads = max(1, hidden_size // 64)
        while hidden_size % heads:
            heads -= 1
        self.attention = torch.nn.MultiheadAttention(hidden_size, heads, batch_first=True)
        self.norm = torch.nn.LayerNorm(hidden_size, eps=1e-12)
        self.token_head = self.two_layers(hidden_size)
        self.value_head = self.two_layers(hidden_size)
        # Initialized as in the official code. PyTorch's default would make the logits four times as wide.
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                std = 0.0 if name.endswith("bias") else 0.02
                torch.nn.init.normal_(parameter, 0.0, std)

    @staticmethod
    def two_layers(hidden_size: int) -> torch.nn.Sequential:
        first, second = torch.nn.Linear(hidden_size, 128), torch.nn.Linear(128, 1)
        return torch.nn.Sequential(first, torch.nn.GELU(), second)

    def token_logits(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """As Policy says."""
        mixed, _ = self.attention(hidden, hidden, hidden, key_padding_mask=~attention_mask,
                                  need_weights=False)
        return self.token_head(self.norm(hidden + mixed)).squeeze(-1)

    def value(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(B,) the critic: what reward it expects for a block, by its mean hidden state."""
        mean = (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)    # (B, H)
        values = self.value_head(mean).squeeze(-1)
        check_finite(values, "the values of the policy")
        return values
